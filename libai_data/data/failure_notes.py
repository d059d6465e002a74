"""Notes in a lock's file that tell those who waited for it that the work of its holder has failed."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from libai_data.errors import error_text

_LONGEST_REASON = 4096


class Failures(NamedTuple):
    """How often the work under a lock has failed, why it did the last time, and how often its result was not kept."""

    times: int = 0
    reason: str = ""
    times_not_kept: int = 0


def failures_noted(descriptor: int) -> Failures:
    """What the file of a lock says.

    Who waits for a lock reads it before and after: more failures then mean that the holder's work has failed.
    """
    try:
        return Failures(*json.loads(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):
        return Failures()  # none yet, or it is just being written


def note_failure(descriptor: int, error: Exception) -> None:
    """Write down that the work has failed; only for who holds the lock.

    Args:
        descriptor: of the lock's file, open for writing.
        error: why.
    """
    found = failures_noted(descriptor)
    _write(descriptor, found._replace(times=found.times + 1, reason=error_text(error)[:_LONGEST_REASON]))


def make_room_for_notes(descriptor: int) -> None:
    """Write a first note, so that a later one finds room on a disk that is full by then.

    Raises:
        OSError: The disk has no room for it.
    """
    _write(descriptor, failures_noted(descriptor))


def note_not_kept(descriptor: int) -> None:
    """Write down that what the work made could not be kept; only for who holds the lock."""
    found = failures_noted(descriptor)
    _write(descriptor, found._replace(times_not_kept=found.times_not_kept + 1))


def _write(descriptor: int, failures: Failures) -> None:
    note = json.dumps(failures).encode()
    os.pwrite(descriptor, note, 0)
    os.ftruncate(descriptor, len(note))
