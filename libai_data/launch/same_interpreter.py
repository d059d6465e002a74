"""Programs of the same interpreter that work for this process."""

from __future__ import annotations

import os
import subprocess
import sys


def interpreter() -> list[str]:
    """The command of this process's interpreter, with its options: some (`-O`, `-W`) change what a user's code does."""
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]


def environment() -> dict[str, str]:
    """This process's environment, with a seed of hashes.

    Without a fixed seed, the processes that share some work would order sets of strings differently.
    """
    found = dict(os.environ)
    if not found.get("PYTHONHASHSEED", "").isdigit():
        found["PYTHONHASHSEED"] = "0"
    return found
