"""The drawing shows what the plan says, and so do the numbers of the page that explains it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from libai_data.global_batch.plan import READERS
from libai_data.in_words import bytes_in_words, numbers_in_words
from libai_data.loader.schema import Layout
from libai_data.parallel_mesh import ParallelMesh
from libai_data.planning.command import main
from libai_data.planning.flow_drawing import flow_drawing
from libai_data.planning.job import JobPlan, PlannedField
from tools.prepare_digits import write_digits

IMAGES = (
    PlannedField("images", np.dtype(np.float32), (3, 224, 224), Layout()),
    PlannedField("labels", np.dtype(np.int64), (), Layout(placement_idx=-1)),
)


def job_of(ranks: int, tensor: int) -> JobPlan:
    """A job of 8 ranks a node, 32 samples a batch and data-parallel rank."""
    return JobPlan(ParallelMesh(ranks // tensor, tensor, 1, num_nodes=ranks // 8), 32, IMAGES)


def drawn_job() -> JobPlan:
    """The job of the page's drawing."""
    return JobPlan(ParallelMesh(4, 2, 1, num_nodes=2), 32, IMAGES)


def rows_of_the_page() -> Iterator[str]:
    """The rows of its table of costs."""
    for tensor in (1, 4):
        for ranks in (8, 64, 1024):
            job = job_of(ranks, tensor)
            for readers in READERS:
                for cost, nodes in job.costs(readers).items():
                    numbers = (cost.bytes_read, cost.bytes_received, cost.bytes_sent, cost.bytes_kept)
                    cells = [bytes_in_words(each) if each else "-" for each in numbers]
                    yield (
                        f"| {ranks:,} | {tensor} | {readers} | {numbers_in_words(nodes)} | {cost.samples_read:,} | "
                        f"{' | '.join(cells)} |"
                    )


def test_the_pages_numbers_are_those_of_the_planner(repository: Path) -> None:
    page = (repository / "docs" / "machines.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| [\d,]+ \| [14] \|.*$", page, re.MULTILINE)
    assert shown == list(rows_of_the_page()), "\n".join(rows_of_the_page())


def test_the_pages_drawing_is_what_is_drawn_now(repository: Path) -> None:
    drawn = flow_drawing(drawn_job()).to_svg(alone=True)
    assert (repository / "docs" / "read_modes.svg").read_text(encoding="utf-8") == drawn


@pytest.mark.parametrize(("data", "tensor", "nodes"), [(4, 2, 2), (1, 1, 1), (128, 8, 128), (3, 1, 3)])
def test_a_drawing_is_an_image_and_shows_who_reads(data: int, tensor: int, nodes: int) -> None:
    job = JobPlan(ParallelMesh(data, tensor, 1, num_nodes=nodes), 2, IMAGES)
    texts = [each.text or "" for each in ElementTree.fromstring(flow_drawing(job).to_svg(alone=True)).iter()]
    per_node, shown = min(job.mesh.ranks_per_node, 4), min(nodes, 2)
    assert (
        sum(text.startswith("rank ") for text in texts if "part" in text and ":" in text[5:9]) == 3 * per_node * shown
    )
    # Each rank; one a node; one.
    assert sum(text.startswith("reads part") for text in texts) == per_node * shown + shown + 1
    assert ("network" in texts) == (nodes > 1)


def test_the_command_draws_a_configs_own_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    write_digits(tmp_path / "data" / "digits")
    monkeypatch.chdir(tmp_path)
    assert main([str(repository / "configs" / "vit_digits.py"), "--nodes", "2", "--drawing", "flow.svg"]) == 0
    assert "rank 1: part 1" in (tmp_path / "flow.svg").read_text()
