"""The exit codes of ranks and launchers, and their meaning."""

from __future__ import annotations

import signal

STOPPED = 85
"""A rank's exit code after a signal to stop, when a checkpoint is saved: the same command resumes the training."""


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
