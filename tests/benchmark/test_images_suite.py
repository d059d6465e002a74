"""The suite of images measures what it says, on few files."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from libai_data.benchmark.rounds import Scale, measure
from libai_data.benchmark.suites import images


@pytest.mark.slow
def test_each_row_is_measured_on_files_that_are_alike_but_not_the_same(tmp_path: Path) -> None:
    pytest.importorskip("flowvision")
    rows = images.rows(Scale(quick=True, seconds=0.0, folder=tmp_path))
    assert [row.name for row in rows] == ["train-2", "decoders"]
    files = list(tmp_path.rglob("*.jpg"))
    assert len(files) == 64 and len({path.read_bytes() for path in files}) == 64
    for path in files[:8]:
        with Image.open(path) as image:
            assert 400 < image.width < 640 and 330 < image.height < 420
    for row in rows:
        measured = measure(row, 1, lambda _: None, settle=0)
        assert not measured.missing
        assert all(values[0] > 0 for values in measured.values.values())
        assert all(claim.judge(measured.values, measured.missing).value is not None for claim in row.claims)
