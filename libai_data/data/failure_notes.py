"""Notes in a lock's file that tell those who waited for it that the work of its holder has failed."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from libai_data.errors import error_text

_LONGEST_REASON = 4096


class Failures(NamedTuple):
    """How often the work under a lock has failed, and why it did the last time."""

    times: int
    reason: str


def failures_noted(descriptor: int) -> Failures:
    """What the file of a lock says.

    Who waits for a lock reads it before and after: more failures then mean that the holder's work has failed.

    Args:
        descriptor: of the lock's file.
    """
    try:
        return Failures(*json.loads(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):
        return Failures(0, "")  # none yet, or it is just being written


def note_failure(descriptor: int, error: Exception) -> None:
    """Write down that the work has failed; only for who holds the lock.

    Args:
        descriptor: of the lock's file, open for writing.
        error: why.
    """
    times = failures_noted(descriptor).times + 1
    note = json.dumps([times, error_text(error)[:_LONGEST_REASON]]).encode()
    os.pwrite(descriptor, note, 0)
    os.ftruncate(descriptor, len(note))
