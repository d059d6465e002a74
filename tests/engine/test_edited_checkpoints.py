"""A checkpoint that was edited, with correct checksums, is refused by an error that names the file and the key."""

from __future__ import annotations

import copy
import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libai_data.engine.checkpoint import Checkpointer
from libai_data.engine.checkpoint.directory import MANIFEST
from libai_data.engine.checkpoint.folder import STATE, read_state
from libai_data.engine.hooks import BestCheckpointer, EarlyStopping
from libai_data.engine.scheduler import ScheduleState
from libai_data.engine.token_count import TokenCounter
from libai_data.errors import CheckpointError
from libai_data.mesh.current import set_mesh
from tests.engine.test_checkpointer import new_model
from tests.engine.test_default_trainer import built
from tests.engine.tiny import tiny_config
from tests.test_odd_states import ODD, part_with, paths_in

JSON_VALUES = [value for value in ODD if type(value) is not object]
STATE_OF_A_RUN = {
    "iteration": 4,
    "optimizer_step": 5,
    "optimizer": "AdamW",
    "mesh": {"data": 1, "tensor": 1, "pipeline": 1},
    "stateful": {},
    "extra": {},
}
SCHEDULE = SimpleNamespace(last_step=0, step=lambda: None, get_last_lr=lambda: [0.1])
STATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "schedule": (lambda: ScheduleState(SCHEDULE), {"last_step": 5, "lr": [0.1]}),
    "tokens": (lambda: TokenCounter(None), {"tokens": 7, "sources": {"web": 3}}),
    "early stopping": (lambda: EarlyStopping(5, "Acc@1"), EarlyStopping(5, "Acc@1").state_dict()),
}


def changes_of(state: Any) -> list[tuple[str, Any]]:
    """Each key of a state, and the state with an odd value of the key, or without the key."""
    found: list[tuple[str, Any]] = []
    for path in paths_in(state):
        for value in [*JSON_VALUES, "absent"]:
            changed = copy.deepcopy(state)
            part_with(changed, path)[path[-1]] = value
            if value == "absent":
                del part_with(changed, path)[path[-1]]
            found.append((path[-1], changed))
    return found


def edit(folder: Path, name: str, content: Any) -> None:
    """Replace a file of a checkpoint, and its checksum."""
    text = (content if isinstance(content, str) else json.dumps(content)).encode()
    (folder / name).write_bytes(text)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][name] = {"bytes": len(text), "crc32": zlib.crc32(text)}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_an_odd_value_in_state_json_is_named_or_accepted(tmp_path: Path) -> None:
    refused = 0
    odd: list[tuple[str, Any]] = [("state.json", []), ("state.json", 3), ("state.json", None)]
    for key, state in odd + changes_of(STATE_OF_A_RUN):
        (tmp_path / STATE).write_text(json.dumps(state))
        try:
            read_state(tmp_path)
        except CheckpointError as error:
            refused += 1
            assert str(tmp_path / STATE) in str(error) and key in str(error), (state, error)
    assert refused > 80
    (tmp_path / STATE).write_text("{")
    with pytest.raises(CheckpointError, match=r"state.json cannot be read: JSONDecodeError"):
        read_state(tmp_path)


@pytest.mark.parametrize("kind", STATES)
def test_an_odd_value_in_a_saved_part_is_named_or_accepted(kind: str) -> None:
    make, saved = STATES[kind]
    refused = 0
    for key, state in changes_of(saved):
        part = make()
        try:
            part.load_state_dict(state)
            json.dumps(part.state_dict()) if kind != "tokens" else None
        except CheckpointError as error:
            refused += 1
            assert "the checkpoint's" in str(error) and key in str(error), (state, error)
    assert refused >= 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps, which has a best checkpoint after the fifth."""
    folder = tmp_path_factory.mktemp("run")
    built(tiny_config(str(folder), train_iter=6)).train()
    return folder


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        (STATE, ("iteration",), "4", r"model_final/state.json's iteration is '4'; it must be an int, at least -1"),
        (STATE, ("stateful", "lr_scheduler"), [], r"the checkpoint's lr_scheduler is \[\]; it must be a mapping"),
        ("random.json", (), {}, r"model_final/random.json is {}; it must be a list with the state of each rank"),
        ("random.json", (0, "python", 1), "x", r"the state of rank 0 in .*model_final/random.json cannot be restored"),
        ("random.json", (0, "oneflow"), None, r"the state of rank 0 in .*random.json cannot be restored: TypeError"),
        ("random.json", (), "[", r"random.json cannot be read: JSONDecodeError"),
    ],
)
def test_a_resume_from_an_edited_checkpoint_names_the_file_and_the_key(
    run: Path, name: str, path: Any, value: Any, message: str
) -> None:
    before = json.loads((run / "model_final" / name).read_text())
    content = copy.deepcopy(before)
    if path:
        part_with(content, path)[path[-1]] = value
    edit(run / "model_final", name, content if path else value)
    set_mesh(None)
    try:
        with pytest.raises(CheckpointError, match=message):
            built(tiny_config(str(run), train_iter=8, resume=True))
    finally:
        edit(run / "model_final", name, before)


@pytest.mark.parametrize("key", ["metric", "value", "iteration"])
def test_an_odd_record_of_the_best_checkpoint_is_named(run: Path, key: str) -> None:
    state = json.loads((run / "model_best" / STATE).read_text())
    before, state["extra"]["best"][key] = copy.deepcopy(state), ["x"]
    edit(run / "model_best", STATE, state)
    hook = BestCheckpointer(5, Checkpointer(new_model(), str(run)), "Acc@1")
    trainer = SimpleNamespace(start_iter=6)
    hook.trainer = trainer
    try:
        with pytest.raises(CheckpointError, match=rf"model_best's extra.best.{key} is \['x'\]; it must be"):
            hook.before_train()
    finally:
        edit(run / "model_best", STATE, before)
