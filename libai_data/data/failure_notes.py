"""Locks of files, and notes in a lock file, by which processes that waited learn that the holder's work has failed."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from contextlib import suppress
from typing import NamedTuple

from libai_data.errors import error_text

logger = logging.getLogger(__name__)

_LONGEST_REASON = 4096


class Failures(NamedTuple):
    """How often the work under a lock has failed, the last reason, and how often its result could not be kept."""

    times: int = 0
    reason: str = ""
    times_not_kept: int = 0


def try_lock(lock: int) -> bool:
    """Acquire a lock, unless another process has it; return whether it was acquired."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # The latter on some network file systems.
        return False
    return True


def lock(descriptor: int, doing: str) -> Failures:
    """Acquire a lock, and wait for it if another process is `doing` the work; returns what was noted meanwhile."""
    before = failures_noted(descriptor)
    if not try_lock(descriptor):
        logger.info("Waiting for another process, which is %s.", doing)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    now = failures_noted(descriptor)
    return Failures(now.times - before.times, now.reason, now.times_not_kept - before.times_not_kept)


def failures_noted(descriptor: int) -> Failures:
    """Read the notes in a lock file."""
    try:
        return Failures(*json.loads(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):
        return Failures()  # there is no note yet, or a process is writing one


def note_failure(descriptor: int, error: Exception) -> None:
    """Note that the work has failed, with the reason, if the disk has room for it; see `write_notes`."""
    found = failures_noted(descriptor)
    with suppress(OSError):
        write_notes(descriptor, found._replace(times=found.times + 1, reason=error_text(error)[:_LONGEST_REASON]))


def write_notes(descriptor: int, failures: Failures) -> None:
    """Write the notes; only the holder of the lock may. An OSError if the disk has no room for the first notes."""
    note = json.dumps(failures).encode()
    os.pwrite(descriptor, note, 0)
    os.ftruncate(descriptor, len(note))
