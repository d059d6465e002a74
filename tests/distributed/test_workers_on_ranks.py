"""Workers beside real ranks: they bring the same batches, join no job, and leave the ranks' connections alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launcher import launch_ranks

SCRIPT = Path(__file__).parent / "scripts" / "load_with_workers.py"


@pytest.mark.slow
def test_every_kind_of_worker_serves_four_ranks() -> None:
    result = launch_ranks(SCRIPT, 4, timeout=150)
    assert result.returncode == 0, result.output
    for rank in range(4):
        assert f"rank {rank} is done" in result.output
