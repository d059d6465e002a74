"""A `DataLoader` of PyTorch's arguments on four ranks: the epochs of one rank, on every mesh and in each read mode."""

from __future__ import annotations

import json
import runpy
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from libai_data.mesh.current import set_mesh
from tests.distributed.launcher import launch_ranks
from tests.distributed.scripts.data_loader_on_ranks import CASES, SAMPLES
from tests.docs.test_documentation_blocks import REPOSITORY, blocks_of

SCRIPT = Path(__file__).parent / "scripts" / "data_loader_on_ranks.py"
MESHES = ("4x1", "2x2", "1x4")
DRAWN_ANEW = ("unseeded", "dropped")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Case and mesh -> the batches of two epochs."""
    file = tmp_path_factory.mktemp("loaders") / "results.json"
    result = launch_ranks(SCRIPT, 4, str(file), timeout=150)
    assert result.returncode == 0, result.output
    results: dict[str, Any] = json.loads(file.read_text())
    return results


def rows(epoch: list[Any]) -> list[int]:
    return [row for batch, valid, _ in epoch for row in batch[:valid]]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", [case for case in CASES if case not in DRAWN_ANEW])
def test_epochs_are_those_of_one_rank_and_states_those_of_any_mesh(found: dict[str, Any], case: str, mesh: str) -> None:
    with closing(CASES[case](global_batch_size=8, fields=["x", "about"])) as alone:
        for number, epoch in enumerate(found[f"{case} {mesh}"]):
            batches = list(alone)
            assert rows(epoch) == [row for batch in batches for row in batch["x"].numpy().tolist()]
            assert [valid for _, valid, _ in epoch] == [len(batch["x"]) for batch in batches]
            states = [state for _, _, state in epoch]
            assert states == [state for _, _, state in found[f"{case} 4x1"][number]], "the state is that of any mesh"


def test_the_cases_are_what_they_claim(found: dict[str, Any]) -> None:
    for epoch in found["weighted 4x1"]:
        assert rows(epoch).count(20) > 4
    for epoch in found["repeated 4x1"]:
        assert rows(epoch) == [7, *[3, 5] * 6], "several ranks get one sample"


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_take_one_order_of_a_sampler_that_each_would_draw_anew(found: dict[str, Any], mesh: str) -> None:
    first, second = (rows(epoch) for epoch in found[f"unseeded {mesh}"])
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second
    for epoch in found[f"dropped {mesh}"]:
        assert [len(batch) for batch, _, _ in epoch] == [8, 8]
        assert len(set(rows(epoch))) == 16


@pytest.mark.parametrize(("page", "name"), [("README.md", "loop.py"), ("docs/index.md", "first.py")])
def test_each_of_four_ranks_prints_what_the_first_program_of_a_page_prints_on_one(
    page: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / name
    program.write_text(next(block.code for block in blocks_of(REPOSITORY / page) if block.language == "python"))
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        set_mesh(None)
    lines = capsys.readouterr().out.splitlines()
    launch = launch_ranks(program, 4, timeout=100)
    assert launch.returncode == 0, launch.output
    assert lines and all(launch.output.count(line) == 4 for line in lines), launch.output
