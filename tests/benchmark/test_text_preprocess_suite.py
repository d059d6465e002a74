"""The suite of preprocessing measures what it says, on little work."""

from __future__ import annotations

from pathlib import Path

import pytest

from libai_data.benchmark.rounds import Scale, measure
from libai_data.benchmark.suites import text_preprocess


@pytest.mark.slow
def test_each_row_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    rows = text_preprocess.rows(Scale(quick=True, seconds=0.0, folder=tmp_path))
    assert [row.name for row in rows] == ["preprocess-1", "preprocess-2", "bert", "t5"]
    for row in rows:
        measured = measure(row, 1, lambda _: None, settle=0)
        assert not measured.missing
        assert all(values[0] > 0 for values in measured.values.values())
        assert all(claim.judge(measured.values, measured.missing).value is not None for claim in row.claims)
