"""Notes in a lock file, from which processes that waited for the lock learn that the holder's work has failed."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from libai_data.errors import error_text

_LONGEST_REASON = 4096


class Failures(NamedTuple):
    """How often the work under a lock has failed, the last reason, and how often its result could not be kept."""

    times: int = 0
    reason: str = ""
    times_not_kept: int = 0


def failures_noted(descriptor: int) -> Failures:
    """Read the notes in a lock file.

    A process that waits for the lock reads the notes before and after. More failures mean that the holder has failed.
    """
    try:
        return Failures(*json.loads(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):
        return Failures()  # there is no note yet, or a process is writing one


def note_failure(descriptor: int, error: Exception) -> None:
    """Note that the work has failed. Only the holder of the lock may call this.

    Args:
        descriptor: of the lock file, open for writing.
        error: the reason.
    """
    found = failures_noted(descriptor)
    _write(descriptor, found._replace(times=found.times + 1, reason=error_text(error)[:_LONGEST_REASON]))


def make_room_for_notes(descriptor: int) -> None:
    """Write a first note, so that there is room for a later note even if the disk is full by then.

    Raises:
        OSError: The disk has no room for the note.
    """
    _write(descriptor, failures_noted(descriptor))


def note_not_kept(descriptor: int) -> None:
    """Note that the result of the work could not be kept. Only the holder of the lock may call this."""
    found = failures_noted(descriptor)
    _write(descriptor, found._replace(times_not_kept=found.times_not_kept + 1))


def _write(descriptor: int, failures: Failures) -> None:
    note = json.dumps(failures).encode()
    os.pwrite(descriptor, note, 0)
    os.ftruncate(descriptor, len(note))
