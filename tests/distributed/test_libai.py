"""LiBai's own trainer, on one rank and on four: its steps take our batches, and its `--resume` goes on exactly."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import launch_ranks
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "train_libai.py"
FAILING = Path(__file__).parent / "scripts" / "fail_in_libai.py"
NEEDED = ("libai", "flowvision", "boto3", "portalocker", "regex", "requests", "scipy", "sentencepiece", "tabulate")
MISSING = [name for name in (*NEEDED, "termcolor", "wget") if find_spec(name) is None]
STEPS, STEPS_BEFORE, SAVED_AFTER = 9, 7, 6
SHORT = ("node",)
LONG = ("no line", "graph", "every_rank", "rank0", "own loader", "evaluating", "no line, a worker")
"""Ways to train in the short run, and those that the long run adds."""
OTHERS = (
    "checkpoint without data",
    "elastic",
    "evaluated",
    "datasets made",
    "our trainer",
    "pipeline",
    "field by field",
)
Found = dict[str, Any]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def launched(folder: Path, *cases: str) -> dict[int, Found]:
    """What rank 0 saw in some cases, by the number of ranks; four go on where one stopped."""
    seen = {}
    for ranks in (1, 4):
        launch = launch_ranks(SCRIPT, ranks, str(folder), *cases, timeout=200, alone=True)
        assert launch.returncode == 0, launch.output
        seen[ranks] = json.loads((folder / f"0-of-{ranks}.json").read_text())
    return seen


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Found]:
    """What the ranks saw in the cases of the short run."""
    return launched(tmp_path_factory.mktemp("libai"), *SHORT, *OTHERS)


@pytest.fixture(scope="module")
def found_in_long_run(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Found]:
    """What they saw in those that the long run adds."""
    return launched(tmp_path_factory.mktemp("libai"), *LONG, "our trainer")


def batches_of_ours(found: dict[int, Found]) -> list[Any]:
    """The batches of our own trainer on one rank."""
    batches: list[Any] = found[1]["our trainer"]["seen"]
    assert len(batches) == STEPS
    assert len({number for batch in batches[:5] for number in batch}) == 40
    return batches


@pytest.fixture(scope="module")
def expected(found: dict[int, Found]) -> list[Any]:
    """The batches of our own trainer in the launches of the short run."""
    return batches_of_ours(found)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("way", [*SHORT, *map(slowly, LONG)])
def test_libais_trainer_takes_the_batches_of_ours_and_resumes_exactly(
    way: str, ranks: int, request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue("found" if way in SHORT else "found_in_long_run")
    parts, expected = found[ranks][way], batches_of_ours(found)
    assert parts["first"] == {"start": 0, "seen": expected[:STEPS_BEFORE]}
    assert parts["resumed"] == {"start": SAVED_AFTER, "seen": expected[SAVED_AFTER:]}


@pytest.mark.parametrize("ranks", [1, 4])
def test_our_trainer_takes_the_same_batches_on_every_mesh(
    ranks: int, found: dict[int, Found], expected: list[Any]
) -> None:
    assert found[ranks]["our trainer"]["seen"] == expected


def test_four_ranks_resume_from_libais_checkpoint_of_one(found: dict[int, Found], expected: list[Any]) -> None:
    assert found[4]["elastic"] == {"start": SAVED_AFTER, "seen": expected[SAVED_AFTER:]}


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_checkpoint_of_libai_alone_goes_on_at_the_step_it_tells(
    ranks: int, found: dict[int, Found], expected: list[Any]
) -> None:
    case = found[ranks]["checkpoint without data"]
    assert case["moved"] == {"start": SAVED_AFTER, "seen": expected[SAVED_AFTER:]}


@pytest.mark.parametrize("ranks", [1, 4])
def test_loaders_of_libai_do_what_they_did(ranks: int, found: dict[int, Found]) -> None:
    parts = found[ranks]["checkpoint without data"]["libai"]
    assert parts["resumed"]["start"] == SAVED_AFTER
    assert parts["resumed"]["seen"] == parts["first"]["seen"][: STEPS - SAVED_AFTER]


@pytest.mark.parametrize("ranks", [1, 4])
def test_libais_evaluation_gets_each_sample_once_with_its_own_output(ranks: int, found: dict[int, Found]) -> None:
    assert found[ranks]["evaluated"] == {"each once": True, "paired": True}


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_dataset_is_made_by_the_ranks_that_read(ranks: int, found: dict[int, Found]) -> None:
    made = {"every_rank": ranks, "node": 1, "rank0": 1}
    assert found[ranks]["datasets made"] == made


def test_the_mesh_is_libais_and_inputs_and_labels_stay_paired_on_a_pipeline(found: dict[int, Found]) -> None:
    assert found[4]["pipeline"] == {"paired": [True] * 3, "sizes": [2, 1, 2], "same stages": True}


def test_a_field_made_global_by_itself_knows_of_parts_and_of_shared_memory(found: dict[int, Found]) -> None:
    assert found[4]["field by field"] == {"parts": True, "own copy": True}


@pytest.mark.slow
def test_a_sample_that_fails_on_one_rank_ends_libais_job_on_all(tmp_path: Path) -> None:
    launch = launch_ranks(FAILING, 2, str(tmp_path), timeout=60, end_on_error=False)
    assert launch.returncode != 0
    assert "sample 11 of Broken" in launch.output
    assert "the disk is gone" in launch.output
