"""The folder of a run's checkpoints: finds, names and removes checkpoints."""

from __future__ import annotations

import json
import logging
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Callable

from libai_data.engine.checkpoint.directory import (
    LAST,
    OWN_ENDINGS,
    OtherVersionError,
    recover,
    verify,
    write_small_file,
)
from libai_data.errors import CheckpointError, error_text
from libai_data.errors.argument_rules import MAPPING, OUTPUT, TEXT, check, whole
from libai_data.errors.saved_state import Keys, check_state
from libai_data.mesh.current import broadcast_py_object, is_main_process

logger = logging.getLogger(__name__)

STATE = "state.json"

_KEYS = Keys(
    {
        "iteration": whole(-1),
        "optimizer_step": whole(0),
        "mesh": Keys(dict.fromkeys(("data", "tensor", "pipeline"), whole(1))),
        "stateful": MAPPING,
        "extra": MAPPING,
    },
    {"optimizer": TEXT},
)

# Names cannot begin with ".": "." is the folder of all checkpoints, and ".." is the folder above.
_NAME = re.compile(r"[\w-][\w.-]*")


class CheckpointFolder:
    """Finds checkpoints. Every method is collective: rank 0 reads the folder, and all ranks return the same result."""

    def __init__(self, save_dir: str = "") -> None:
        if save_dir:
            check({"save_dir": OUTPUT}, save_dir=save_dir)
        self.save_dir = save_dir
        self.sound: set[Path] = set()  # checkpoints that rank 0 has verified already

    def recover(self) -> None:
        """Clean up after a run that was killed while it wrote. Only the run that owns `save_dir` may call this."""
        if self.save_dir:
            of_rank0(partial(_recover, Path(self.save_dir)))

    def tag_last_checkpoint(self, name: str) -> None:
        """Make `name` the checkpoint from which a resume continues; an OSError on rank 0 if it cannot be written."""
        folder = Path(self.save_dir)
        if is_main_process() and read_last(folder) != name:
            write_small_file(folder / LAST, name)

    def remove(self, name: str) -> None:
        """Delete a checkpoint, unless it is the last one."""
        check_name(name)
        folder = Path(self.save_dir)
        if is_main_process() and read_last(folder) != name:
            shutil.rmtree(folder / name, ignore_errors=True)

    def has_checkpoint(self) -> bool:
        """Whether there is an intact checkpoint to resume from."""
        return bool(self.get_checkpoint_file())

    def get_checkpoint_file(self) -> str:
        """Path of the newest intact checkpoint, or "".

        This is the checkpoint that `last_checkpoint` names. If it is damaged or missing, this is the newest one before
        it; the log names each damaged checkpoint. If it is of another version of this package: an OtherVersionError.
        """
        return str(of_rank0(self._newest_sound) or "")

    def checkpoint_to_resume(self) -> str:
        """Path of the newest intact checkpoint; raises CheckpointError if there is none."""
        path = self.get_checkpoint_file()
        if not path:
            raise CheckpointError(
                f"--resume found no intact checkpoint in train.output_dir ({self.save_dir}); start without --resume, "
                "or give the train.output_dir of the run to continue"
            )
        return path

    def names_before(self, prefix: str, iteration: int) -> list[str]:
        """Checkpoints "<prefix>_<index>" of steps before `iteration`, oldest first."""
        names: list[str] = []
        if is_main_process() and Path(self.save_dir).is_dir():
            pattern = re.compile(re.escape(prefix) + r"_(\d{7,})")
            matches = [pattern.fullmatch(path.name) for path in Path(self.save_dir).iterdir()]
            indices = sorted((int(match.group(1)), match.group(0)) for match in matches if match)
            names = [name for index, name in indices if index < iteration]
        return broadcast_py_object(names)

    def peek(self, path: str) -> dict[str, Any]:
        """As `read`; {} if there is no checkpoint, or it is damaged."""
        try:
            return self.read(path)
        except CheckpointError as error:
            if is_main_process() and Path(path).is_dir():
                logger.warning("%s", error)
            return {}

    def read(self, path: str) -> dict[str, Any]:
        """The `state.json` of a checkpoint, without its tensors; on all ranks a CheckpointError if it is not intact."""
        directory = Path(path)

        def verified() -> dict[str, Any]:
            self._verify(directory)
            return read_state(directory)

        state: dict[str, Any] = of_rank0(verified)
        return state

    def check(self, directory: Path) -> None:
        """Verify all files of a checkpoint; raises CheckpointError on all ranks if it is not intact."""
        of_rank0(lambda: self._verify(directory))

    def _newest_sound(self) -> Path | None:
        folder = Path(self.save_dir)
        if not folder.is_dir():
            return None
        last = read_last(folder)
        candidates = [folder / last] if last else []
        newest = _iteration_of(folder / last) if last else float("inf")
        others = [path for path in folder.iterdir() if (path / STATE).is_file() and path.name != last]
        candidates += sorted(
            (path for path in others if _iteration_of(path) <= newest), key=_iteration_of, reverse=True
        )
        for path in candidates:
            try:
                self._verify(path)
                return path
            except OtherVersionError:
                raise
            except CheckpointError as error:
                logger.warning("%s; trying an earlier one.", error)
        return None

    def _verify(self, path: Path) -> None:
        if path not in self.sound:
            verify(path)
            self.sound.add(path)


def _recover(folder: Path) -> None:
    if (folder / LAST).is_dir():
        raise CheckpointError(
            f"{folder / LAST} is a folder, but checkpoints need a file of this name; move it away, or give another "
            "train.output_dir"
        )
    recover(folder)


def of_rank0(do: Callable[[], Any], error_class: type[Exception] = CheckpointError) -> Any:
    """What a function returns on rank 0, or its error of this class, on all ranks."""
    found, problem = None, ""
    if is_main_process():
        try:
            found = do()
        except error_class as error:
            problem = str(error)
    found, problem = broadcast_py_object((found, problem))
    if problem:
        raise error_class(problem)
    return found


def read_state(directory: Path) -> dict[str, Any]:
    """The `state.json` of an intact checkpoint; raises CheckpointError for what no training has written there."""
    state: dict[str, Any] = read_json(directory / STATE)
    check_state(state, _KEYS, "a training", subject=str(directory / STATE))
    return state


def read_json(path: Path) -> Any:
    """The contents of a JSON file of a checkpoint; raises CheckpointError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error_text(error)}") from error


def check_name(name: str) -> None:
    """Raise CheckpointError if no checkpoint may have this name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == LAST or name.endswith(OWN_ENDINGS):
        raise CheckpointError(
            f"a checkpoint cannot be called {name!r}: use letters, digits, '_', '-' and '.', but no '.' at the "
            f"beginning, no {' or '.join(OWN_ENDINGS)} at the end, and not {LAST!r}"
        )


def read_last(folder: Path) -> str:
    """The name in `last_checkpoint`; "" if there is no such file, or it is no text."""
    try:
        return (folder / LAST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _iteration_of(path: Path) -> float:
    """The step after which a checkpoint was written; infinite if neither `state.json` nor the name has it."""
    try:
        return float(json.loads((path / STATE).read_text(encoding="utf-8"))["iteration"])
    except (OSError, ValueError, KeyError, TypeError):
        match = re.search(r"_(\d{7,})$", path.name)
        return float(match.group(1)) if match else float("inf")
