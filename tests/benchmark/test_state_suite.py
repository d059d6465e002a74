"""The state's suite measures a state at step 10^6, which is under one kilobyte."""

from __future__ import annotations

from pathlib import Path

from libai_data.benchmark.rounds import Scale, measure
from libai_data.benchmark.suites import state


def test_each_row_is_measured_and_the_state_is_small(tmp_path: Path) -> None:
    restore, size = (
        measure(row, 1, lambda _: None, settle=0) for row in state.rows(Scale(quick=True, seconds=0.0, folder=tmp_path))
    )
    assert all(values[0] > 0 for values in restore.values.values())
    assert all(claim.judge(size.values, size.missing).met for claim in size.row.claims)


def test_the_state_that_is_restored_stands_at_step_one_million() -> None:
    for make in (state._plain, state._with_ramp_and_skips):
        loader = make()
        loader.load_state_dict(state._state(make))
        assert loader.stream.state.step == 10**6
