"""A Ctrl-C, or what another thread does, at a line of one's choice."""

from __future__ import annotations

import dis
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Callable

from libai_data.data.random import sample_generators

_POP_BLOCK, _ROT_TWO = dis.opmap["POP_BLOCK"], dis.opmap["ROT_TWO"]


@contextmanager
def interrupted_at(line: int, files: str | tuple[str, ...]) -> Iterator[None]:
    """Raise KeyboardInterrupt before the n-th line of some files or folders that this thread of this process runs."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with acting_at(line, files, interrupt):
        yield
    assert sample_generators() == []  # Nothing is read any more.


@contextmanager
def without_collections() -> Iterator[None]:
    """For a real Ctrl-C: what Hypothesis runs at a garbage collection would swallow it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def acting_at(line: int, files: str | tuple[str, ...], act: Callable[[], None]) -> Iterator[None]:
    """Call `act` before the n-th line of some files or folders that this thread of this process runs."""
    left, process, has_acted = line, os.getpid(), False

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        nonlocal left, has_acted
        if not frame.f_code.co_filename.startswith(files) or os.getpid() != process:
            return None
        if event == "line":
            left -= 1
            if left <= 0 and not has_acted and not is_finalizing(frame) and not leaves_block(frame):
                has_acted = True
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def is_finalizing(frame: FrameType | None) -> bool:
    """Whether a frame belongs to a `__del__`, from which Python lets no exception out."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def leaves_block(frame: FrameType) -> bool:
    """Whether a `with` or `try` block has just ended, so that what ends it runs next.

    There Python looks for no signal, and a lock would stay held (3.9 looks, for one instruction: bpo-29988).
    """
    code, at = frame.f_code.co_code, frame.f_lasti - 2
    if at >= 2 and code[at] == _ROT_TWO:  # It keeps the result of a `return`.
        at -= 2
    return at >= 0 and code[at] == _POP_BLOCK
