"""The exit codes of ranks and launchers, and their meaning."""

from __future__ import annotations

import signal

STOPPED = 85
"""A rank's exit code after a signal to stop, when a checkpoint is saved: the same command resumes the training."""


# A rank that ends because another one is gone has one of these codes, and each other code tells more of the cause.
_FAR_FROM_CAUSE = {1: 1, 128 + signal.SIGABRT: 2}


def distance_from_cause(returncode: int) -> int:
    """How little a code tells of the cause of a failure: the larger, the likelier the process followed another one."""
    return _FAR_FROM_CAUSE.get(as_exit_code(returncode), 0)


def as_exit_code(returncode: int) -> int:
    """A process's exit code as a shell shows it: 128 + N if signal N ended the process (-N in Python)."""
    return returncode if returncode >= 0 else 128 - returncode


def described(returncode: int) -> str:
    """A process's return code in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:  # A real-time signal.
        return f"signal {-returncode}"
