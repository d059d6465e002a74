"""The output folder of a training: only one training at a time writes to it, and it has the results of one run.

Rank 0 locks `run.json` in the folder, which names the job. The lock ends with rank 0's process.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from libai_data.config import LazyConfig
from libai_data.config.yaml_format import to_yaml
from libai_data.data.failure_notes import try_lock
from libai_data.engine.checkpoint.directory import LAST, MANIFEST, is_remainder
from libai_data.engine.checkpoint.folder import STATE, of_rank0
from libai_data.errors import ConfigError
from libai_data.launch.restarts import JOB_VARIABLE, RESTARTED_VARIABLE
from libai_data.mesh.current import is_main_process

logger = logging.getLogger(__name__)

FAST_DEV_RUN = "fast_dev_run"
_RECORD = "run.json"
_RECORD_BYTES = 512
CONFIG = "config.yaml"
_LOGS = ("log.txt", "log_eval.txt")
_CHECKPOINT = re.compile(r"model_(\d{7,}|best|final)")
_FILES = (LAST, "metrics.json")
_PREFIXES = (*_LOGS, "events.out.tfevents.")
# A killed training may take a moment to end, and a file server needs longer to notice that a machine is gone.
_SECONDS_TO_END = 2.0
_SECONDS_TO_END_OF_SAME_JOB = 120.0

_locked: dict[str, int] = {}
"""Folder -> descriptor of the locked file. The lock ends when this process closes the descriptor."""

_taken_before: set[str] = set()
"""Folders that this process has trained in: another training of the same process is no restart."""


class Taken(NamedTuple):
    """A folder that this run has locked: whether the run resumes from it, and where an earlier run was moved, or "".

    `use` identifies this use of the folder.
    """

    resume: bool
    moved_to: str
    use: str


def user_resumes(args: Any) -> bool:
    """Whether the user gave `--resume`; False if the launcher restarted the job and added it."""
    return bool(getattr(args, "resume", False)) and not os.environ.get(RESTARTED_VARIABLE)


def take_output_folder(
    folder: str, resume: bool, weights: str = "", is_trial: bool = False, last_use: str = ""
) -> Taken:
    """Lock the folder for this run. Unless the run resumes, move aside what an earlier run left there. Collective.

    If this job itself wrote there before a failure, the run resumes without `--resume`: `LIBAI_DATA_JOB` names the job.

    Args:
        folder: `train.output_dir`; created if needed.
        resume: the user wants to continue from a checkpoint in the folder.
        weights: checkpoint whose weights the run starts with, if any; it may not be in a folder to be moved.
        is_trial: delete the results in the folder; for `--fast-dev-run`.
        last_use: `Taken.use` when this trainer has trained here last; "" if it has not.
    """

    def take() -> Taken:
        try:
            return _take(Path(folder), resume, weights, is_trial, last_use)
        except FileExistsError as error:
            what = "is a file, or a link to nothing; give the path of a folder"
            raise ConfigError(f"train.output_dir {folder} {what}") from error
        except OSError as error:
            raise ConfigError(f"train.output_dir {folder} cannot be written: {error}") from error

    taken: Taken = of_rank0(take, ConfigError)
    return taken


def release_output_folder(folder: str) -> None:
    """Unlock the folder for other trainings."""
    descriptor = _locked.pop(os.path.realpath(folder), None)
    if descriptor is not None:
        os.close(descriptor)


def save_config(folder: str, cfg: Any) -> str:
    """Write `config.yaml`; returns the new path of an earlier config that differs, "" if there is none.

    It becomes `config.1.yaml`, or the first free number: a user who cannot resume with other values needs the old ones.
    """
    path, kept = Path(folder, CONFIG), ""
    if path.exists() and path.read_bytes() != to_yaml(cfg).encode():
        kept = next(name for number in count(1) if not os.path.exists(name := f"{folder}/config.{number}.yaml"))
        os.rename(path, kept)
    LazyConfig.save(cfg, path)
    return kept


def clear_trial(folder: str) -> None:
    """Delete what a trial (`--fast-dev-run`) wrote into its folder, except its log."""
    if is_main_process() and os.path.basename(folder) == FAST_DEV_RUN:
        _delete_results(Path(folder))
        (Path(folder) / _RECORD).unlink(missing_ok=True)
        release_output_folder(folder)


def _delete_results(folder: Path) -> None:
    for entry in [entry for entry in folder.iterdir() if _is_of_a_run(entry) and not _is_log(entry)]:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _take(folder: Path, resume: bool, weights: str, is_trial: bool, last_use: str) -> Taken:
    folder.mkdir(parents=True, exist_ok=True)
    key = os.path.realpath(folder)
    _check_outside_of_checkpoints(Path(key))
    job = os.environ.get(JOB_VARIABLE, "")
    before = _lock(folder, job)
    if last_use and before and before.get("use") != last_use:
        host, process = before.get("process", ("another machine", "?"))
        raise ConfigError(
            f"another training (on {host}, process {process}, since {before.get('since', '?')}) has used "
            f"train.output_dir {folder} since this trainer's last call of train; continue from its last checkpoint, "
            "with a new trainer and train.resume=True, or give another train.output_dir"
        )
    is_own = bool(job) and before.get("job") == job and key not in _taken_before
    has_checkpoint = (folder / LAST).exists() or any(_is_checkpoint(entry) for entry in folder.iterdir())
    if is_trial:
        _delete_results(folder)
        resumes, moved_to = False, ""
    elif is_own or resume:
        # Before the first checkpoint, a restart begins at step 0 in the same folder, so the failed attempt's log stays.
        resumes, moved_to = has_checkpoint or resume, ""
    else:
        resumes, moved_to = False, _moved_aside(folder, weights)
    _taken_before.add(key)
    return Taken(resumes, moved_to, _write_record(_locked[key], job))


def _check_outside_of_checkpoints(folder: Path) -> None:
    """Raise ConfigError if another run would replace or remove this folder as one of its checkpoints."""
    for path in (folder, *folder.parents):
        names_of_run = os.path.isfile(path.parent / _RECORD) and _CHECKPOINT.fullmatch(path.name)
        if names_of_run or all(os.path.isfile(path / name) for name in (STATE, MANIFEST)):
            raise ConfigError(
                f"train.output_dir {folder} is in {path}, a checkpoint of the run in {path.parent}, which may replace "
                "or remove it; give a folder outside"
            )


def _lock(folder: Path, job: str) -> dict[str, Any]:
    """Lock the folder's record; returns its contents, which describe the run before."""
    path = folder / _RECORD
    key = os.path.realpath(folder)
    if key in _locked:
        return _read(_locked[key])
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    start = time.monotonic()
    try:
        while not try_lock(descriptor):
            before = _read(descriptor)
            is_same_job = bool(job) and before.get("job") == job
            if time.monotonic() - start > (_SECONDS_TO_END_OF_SAME_JOB if is_same_job else _SECONDS_TO_END):
                os.close(descriptor)
                host, process = before.get("process", ("another machine", "?"))
                raise ConfigError(
                    f"train.output_dir {folder} belongs to a training that is still running on {host} (process "
                    f"{process}, since {before.get('since', '?')}); wait until it has ended, or give another "
                    "train.output_dir"
                )
            time.sleep(0.05)
    except OSError as error:
        logger.warning("%s cannot be locked (%s): a second training in this folder would not be detected.", path, error)
    if not _taken_before:
        os.register_at_fork(after_in_child=_unlock_in_child)
    _locked[key] = descriptor
    return _read(descriptor)


def _unlock_in_child() -> None:
    # A forked process that has the file open keeps the lock. A worker may outlive this process, so it closes the file.
    for descriptor in _locked.values():
        os.close(descriptor)
    _locked.clear()
    _taken_before.clear()


def _read(descriptor: int) -> dict[str, Any]:
    try:
        record = json.loads(os.pread(descriptor, _RECORD_BYTES, 0))
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _write_record(descriptor: int, job: str) -> str:
    """Write the record of a new use of the folder; returns the `use`."""
    process, use = [socket.gethostname(), os.getpid()], uuid.uuid4().hex
    record = {"job": job, "process": process, "since": time.strftime("%Y-%m-%d %H:%M:%S"), "use": use}
    # The record always has the same length, so a restart on a full disk can still write it.
    os.pwrite(descriptor, json.dumps(record).encode().ljust(_RECORD_BYTES - 1) + b"\n", 0)
    return use


def _moved_aside(folder: Path, weights: str) -> str:
    """Move what an earlier run left to the first free name of FOLDER.1, FOLDER.2, ...; returns this name, or ""."""
    found = [entry for entry in folder.iterdir() if _is_of_a_run(entry)]
    # Logs of attempts without results stay, and the next attempt appends to them.
    if all(_is_log(entry) or _is_config(entry.name) for entry in found):
        return ""
    real = Path(os.path.realpath(folder))
    if weights and real in Path(os.path.realpath(weights)).parents:
        raise ConfigError(
            f"train.load_weight {weights} is in train.output_dir {folder}, from which the earlier run is moved aside "
            "before a new one starts; give another train.output_dir, or --resume to continue the earlier run"
        )
    target = next(path for number in range(1, 10**6) if not (path := real.with_name(f"{real.name}.{number}")).exists())
    moved: list[Path] = []
    try:
        target.mkdir()
        # `last_checkpoint` first, so that it never names a checkpoint that was already moved.
        for entry in sorted(found, key=lambda entry: entry.name != LAST):
            os.rename(entry, target / entry.name)
            moved.append(entry)
    except OSError as error:
        # Otherwise, a later --resume would continue with the checkpoints that were not moved.
        with suppress(OSError):
            for entry in reversed(moved):
                os.rename(target / entry.name, entry)
            target.rmdir()
        raise ConfigError(
            f"train.output_dir {folder} has an earlier run, which cannot be moved to {target} ({error}); continue it "
            "with --resume, or give another train.output_dir"
        ) from error
    return str(target)


def _is_of_a_run(entry: Path) -> bool:
    return (
        entry.name in _FILES
        or _is_config(entry.name)
        or entry.name.startswith(_PREFIXES)
        or is_remainder(entry)
        or _is_checkpoint(entry)
    )


def _is_checkpoint(entry: Path) -> bool:
    return (entry / STATE).is_file() and (entry / MANIFEST).is_file()


def _is_config(name: str) -> bool:
    return re.fullmatch(r"config(\.\d+)?\.yaml", name) is not None


def _is_log(entry: Path) -> bool:
    return entry.name.startswith(_LOGS)
