"""Memory for pixels that are soon forgotten, used again: pages that the system gives and takes back cost much time."""

from __future__ import annotations

import threading

import numpy as np

_MOST_BYTES = 1 << 25


class _Kept(threading.local):
    def __init__(self) -> None:
        self.memory: dict[str, np.ndarray] = {}


_kept = _Kept()


def scratch(purpose: str, shape: tuple[int, ...]) -> np.ndarray:
    """A uint8 array, which holds its pixels until this thread asks for the same purpose again.

    Args:
        purpose: whoever asks.
        shape: of the array; what is larger than 32 MB is made anew.
    """
    size = int(np.prod(shape))
    if size > _MOST_BYTES:
        return np.empty(shape, np.uint8)
    memory = _kept.memory.get(purpose)
    if memory is None or memory.size < size:
        memory = _kept.memory[purpose] = np.empty(size, np.uint8)
    return memory[:size].reshape(shape)
