"""Libraries that decode and change images, imported when they are first used, and memory for their results."""

from __future__ import annotations

import threading
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from libai_data.errors import installed

_INSTALL = "libai_data[images]"
_MOST_BYTES = 1 << 25


@cache
def has_opencv() -> bool:
    """Whether OpenCV is installed."""
    return find_spec("cv2") is not None


@cache
def opencv() -> Any:
    """OpenCV, without threads of its own, because workers share the cores; an ImportError if it is not installed."""
    cv2 = installed("cv2", "changing images", _INSTALL)
    cv2.setNumThreads(0)
    return cv2


@cache
def libjpeg_turbo() -> Any:
    """The binding of libjpeg-turbo, simplejpeg; an ImportError if it is not installed."""
    return installed("simplejpeg", "decoding JPEG files", _INSTALL)


_scratch = threading.local()


def scratch(purpose: str, shape: tuple[int, ...]) -> np.ndarray:
    """A uint8 array, whose content is valid until this thread calls this with the same purpose again.

    Memory of up to 32 MB is reused, because it takes much time to get pages from the system and to return them.
    """
    size = int(np.prod(shape))
    if size > _MOST_BYTES:
        return np.empty(shape, np.uint8)
    memory: np.ndarray | None = getattr(_scratch, purpose, None)
    if memory is None or memory.size < size:
        memory = np.empty(size, np.uint8)
        setattr(_scratch, purpose, memory)
    return memory[:size].reshape(shape)
