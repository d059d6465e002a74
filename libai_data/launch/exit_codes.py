"""What the exit codes of ranks and launchers mean."""

from __future__ import annotations

import signal

STOPPED = 85
"""A rank's exit code for "I was told to stop, and have saved": run the same command again to go on."""


def as_exit_code(returncode: int) -> int:
    """A process's return code as a shell would give it: 128 + N where signal N (-N in Python) ended it."""
    return returncode if returncode >= 0 else 128 - returncode


def described(returncode: int) -> str:
    """A process's return code in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:  # A real-time signal.
        return f"signal {-returncode}"
