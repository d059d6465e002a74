"""The delivery suite: what its rows demand, what its ranks measure, and a short run on real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from libai_data.benchmark.claims import AtLeast, AtMost
from libai_data.benchmark.crew import CrewError, SharedCrew
from libai_data.benchmark.deliveries import CONTENDERS, seconds_a_step
from libai_data.benchmark.rounds import Scale
from libai_data.benchmark.suites.delivery import rows
from libai_data.benchmark.works import IMAGE_SHAPE, ReadyImages, Resized, write_pictures

DEMANDS = {
    "tokens": "libai_data / to_global >= 20 x",
    "images": "libai_data / to_global >= 2.5 x",
    "rank0-4x1": "libai_data / guide >= 8 x",
    "rank0-2x2": "libai_data / guide >= 8 x",
    "jpeg-1x4": "node / data_parallel >= 3.5 x",
    "jpeg-2x2": "node / data_parallel >= 1.8 x",
    "digits": "waiting <= 2 %",
    "checks": "tokens <= 1 %, images <= 1 %",
}


def test_the_rows_demand_what_was_promised(tmp_path: Path) -> None:
    found = {}
    for row in rows(Scale(True, 0.1, tmp_path)):
        claims = [
            f"{claim.contender} / {claim.than} {claim.demand}"
            if isinstance(claim, AtLeast)
            else f"{claim.contender} {claim.demand}"
            for claim in row.claims
        ]
        found[row.name] = ", ".join(claims)
        for claim in row.claims:
            names = {contender.name for contender in row.contenders}
            assert {claim.contender, getattr(claim, "than", claim.contender)} <= names
            assert isinstance(claim, (AtLeast, AtMost))
    assert found == DEMANDS


def test_the_ranks_can_measure_every_contender_and_no_other(tmp_path: Path) -> None:
    named = [f"{row.name}/{each.name}" for row in rows(Scale(True, 0.1, tmp_path)) for each in row.contenders]
    assert sorted(named) == sorted(CONTENDERS)


def test_a_step_is_timed_over_as_many_steps_as_fit() -> None:
    steps = []
    seconds = seconds_a_step(lambda: steps.append(1), 0.05)
    assert len(steps) > 20
    assert 0 < seconds < 0.01


def test_ready_images_write_to_new_memory_only() -> None:
    dataset = ReadyImages()
    out: dict[str, np.ndarray] = {"images": np.zeros((2, *IMAGE_SHAPE), np.float32), "labels": np.zeros(2, np.int64)}
    dataset.read_batch(np.array([3, 4]), out)
    assert out["images"].min() == 1
    assert out["labels"].tolist() == [3, 4]
    out["images"][0] = 5
    dataset.read_batch(np.array([6, 7]), out)
    assert out["images"][0].max() == 5
    assert set(ReadyImages(labels=False)[0]) == {"images"}


def test_pictures_are_photographs_of_one_size_in_two_classes(tmp_path: Path) -> None:
    write_pictures(tmp_path, 4)
    paths = sorted(tmp_path.glob("*/*.jpg"))
    assert [path.parent.name for path in paths] == ["0", "0", "1", "1"]
    with Image.open(paths[0]) as picture:
        assert picture.size == (500, 375)
        pixels = Resized()(picture)
    assert pixels.shape == IMAGE_SHAPE
    assert pixels.dtype == np.float32
    assert pixels.std() > 0.05


@pytest.mark.slow
def test_the_tool_measures_on_four_ranks(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repository / "tools" / "benchmark.py"), "delivery", "--quick", "--rounds", "2"]
    result = tmp_path / "result.json"
    command += ["--only", "tokens", "--json", str(result)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(result.read_text())["rows"]
    assert {name: len(values) for name, values in found["values"].items()} == {"libai_data": 2, "to_global": 2}
    assert all(value > 0 for values in found["values"].values() for value in values)


def test_a_rank_that_fails_is_reported_with_its_traceback(tmp_path: Path) -> None:
    with SharedCrew(1) as crew, pytest.raises(CrewError, match=r"(?s)rank 0 failed.*KeyError: 'nothing'"):
        crew.tell(do="measure", name="nothing")
