"""The folder of unfinished work, which one process at a time uses, for one plan."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from libai_data.atomic_files import written_whole
from libai_data.data.failure_notes import try_lock
from libai_data.errors import ConfigError, StorageError

LOCK = "lock"
_PLAN = "plan.json"


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Make a folder, and lock it for this process within the block; unfinished files are removed before and after. A
    ConfigError if another process has the lock or has just finished; a StorageError if no folder can be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "w")  # noqa: SIM115
    except OSError as error:
        raise StorageError(f"no files can be written at {folder} ({error.strerror}); give another path") from error
    with lock as file:
        if not try_lock(file.fileno()):
            raise ConfigError(f"another process is writing to {folder}; wait until it ends, or end it")
        if not os.fstat(file.fileno()).st_nlink:
            raise ConfigError(f"another process has just finished the work in {folder}; run this again if needed")
        remove_unfinished(folder)
        try:
            yield
        finally:
            remove_unfinished(folder)


def remove_unfinished(folder: Path, beginning: str = "") -> None:
    """Remove the files that killed processes were writing, whose names begin in this way."""
    for path in folder.glob(f"{escape(beginning)}*.unfinished"):
        path.unlink(missing_ok=True)


def keep_to_plan(folder: Path, plan: dict[str, Any]) -> None:
    """Write the plan of the work into a folder; a ConfigError with the differences if its shards have another plan."""
    plan, file = json.loads(json.dumps(plan)), folder / _PLAN
    if not file.exists():
        write_json(file, plan)
        return
    check_same_plan(folder, json.loads(file.read_text(encoding="utf-8")), plan)


def check_same_plan(folder: Path, before: dict[str, Any], plan: dict[str, Any]) -> None:
    """Refuse to mix the shards of two plans."""
    changed = sorted(name for name in plan if before.get(name) != plan[name])
    if changed:
        diff = "; ".join(f"{name} was {_short(before.get(name))}, and is now {_short(plan[name])}" for name in changed)
        raise ConfigError(f"{folder} contains shards of another run: {diff}. Repeat its command, or remove the folder")


def write_json(file: Path, content: Any) -> None:
    """Write a file completely or not at all."""
    with written_whole(file) as unfinished:
        unfinished.write_text(json.dumps(content), encoding="utf-8")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-90:]}"
