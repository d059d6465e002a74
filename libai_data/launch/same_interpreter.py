"""Programs of the same interpreter that work for this process."""

from __future__ import annotations

import os
import subprocess
import sys

from libai_data.errors import ConfigError


def interpreter() -> list[str]:
    """The command of this process's interpreter, with its options, such as `-O`; a ConfigError if it has none."""
    if not sys.executable:
        raise ConfigError(
            f"sys.executable is {sys.executable!r}, so this program cannot start other processes; set it to a Python "
            "with the same packages"
        )
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]


def import_paths() -> list[str]:
    """This process's `sys.path`, without entries that imports do not use, such as a `Path`."""
    return [os.fsdecode(entry) for entry in sys.path if isinstance(entry, (str, bytes))]


def arguments() -> list[str]:
    """This process's `sys.argv`; a program that runs Python inside of it may have none."""
    return [*map(str, getattr(sys, "argv", None) or ())]


def environment() -> dict[str, str]:
    """This process's environment, with a seed of hashes.

    Without a fixed seed, the processes that share some work would order sets of strings differently.
    """
    found = dict(os.environ)
    if not found.get("PYTHONHASHSEED", "").isdigit():
        found["PYTHONHASHSEED"] = "0"
    return found


def has_random_hashes() -> bool:
    """Whether Python chose the hash seed of this process at random, so that no other program can have the same."""
    seed = os.environ.get("PYTHONHASHSEED", "")
    # With the seed 0, Python randomizes nothing; so if it does, the variable was set after the start.
    return bool(sys.flags.hash_randomization) and not (seed.isdigit() and int(seed))
