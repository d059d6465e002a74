"""The plan's suite measures the plan that ranks follow, which stays below its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from libai_data.benchmark.rounds import Scale, measure
from libai_data.benchmark.suites import plan
from libai_data.global_batch.plan import READERS, ReadPlan


def test_each_row_is_measured_and_memory_is_below_its_limit(tmp_path: Path) -> None:
    rows = plan.rows(Scale(quick=True, seconds=0.0, folder=tmp_path))
    step, memory, paper = (measure(row, 1, lambda _: None, settle=0) for row in rows)
    for measured in (step, memory, paper):
        assert all(values[0] > 0 for values in measured.values.values())
    assert all(claim.judge(memory.values, memory.missing).met for claim in memory.row.claims), memory.values
    # Limits of time, ten times over: this machine may be busy.
    assert all(values[0] < 500 for values in {**step.values, **paper.values}.values()), (step.values, paper.values)


@pytest.mark.parametrize("readers", READERS)
def test_the_reader_that_is_measured_serves_those_that_it_is_said_to(readers: str) -> None:
    read = ReadPlan(plan.mesh_of_rank(0), readers)
    batch = plan.reader(readers).batch_at(0)
    assert batch is not None
    served = plan.served_by(read)
    assert len(batch.indices) == plan.ROWS * len({read.shard_of(rank) for rank in served})
    assert len(served) == {"data_parallel": 1, "node": 8, "rank0": 1024}[readers]
