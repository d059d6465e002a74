"""A user's loader and hooks may have another state on each rank: a resume restores that of each rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libai_data.engine.data_state import DataState, PlainState
from libai_data.errors import CheckpointError
from tests.distributed.launcher import found_by_ranks
from tests.engine.test_odd_parts import CountsLabels

SCRIPT = Path(__file__).parent / "scripts" / "own_states.py"


def test_each_rank_resumes_with_its_own_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = found_by_ranks(SCRIPT, 2, tmp_path, timeout=60)
    assert found == [[[3, 3, 3]] * 2, [[103, 13, 3]] * 2]
    stateful = json.loads((tmp_path / "run" / "model_final" / "state.json").read_text())["stateful"]
    assert stateful["hook OwnHook_2"] == {"count": 3}
    hook = CountsLabels()
    PlainState(hook).load_state_dict(stateful["hook OwnHook"])
    assert hook.state == {"count": 3}
    assert "CountsLabels had another state on each of 2 ranks; it gets that of rank 0" in caplog.text
    with pytest.raises(CheckpointError, match=r"another state on each of 2 ranks, which cannot be restored on 1 ranks"):
        DataState(hook).load_state_dict(stateful["train_loader"])
