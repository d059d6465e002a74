"""LiBai's own trainer, on four ranks and on one: its steps take our batches, and its `--resume` goes on exactly."""

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
ALONE = ("no line", "graph", "own loader")
"""Those that it tries on one rank too."""
OTHERS = (
    "checkpoint without data",
    "another mesh",
    "evaluated",
    "datasets made",
    "our trainer",
    "pipeline",
    "our pipeline",
    "field by field",
)
Found = dict[str, Any]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def launched(ranks: int, folder: Path, *cases: str) -> Found:
    """What rank 0 saw in some cases."""
    launch = launch_ranks(SCRIPT, ranks, str(folder), *cases, timeout=200, alone=True)
    assert launch.returncode == 0, launch.output
    found: Found = json.loads((folder / f"0-of-{ranks}.json").read_text())
    return found


@pytest.fixture(scope="module")
def short_found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What four ranks saw in the cases of the short run; the start of a rank with LiBai takes seconds."""
    return launched(4, tmp_path_factory.mktemp("libai"), *SHORT, *OTHERS)


@pytest.fixture(scope="module")
def long_found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Found]:
    """What the ranks saw in the cases that the long run adds; four go on where one stopped."""
    folder = tmp_path_factory.mktemp("libai")
    one = launched(1, folder, *SHORT, *OTHERS, *ALONE)
    return {1: one, 4: launched(4, folder, *LONG, "our trainer", "elastic")}


@pytest.fixture(params=[slowly(1), 4])
def found(request: pytest.FixtureRequest) -> Found:
    """What one rank or four saw."""
    if request.param == 4:
        return dict(request.getfixturevalue("short_found"))
    return dict(request.getfixturevalue("long_found")[1])


def batches_of_ours(found: Found) -> list[Any]:
    """The batches of our own trainer."""
    batches: list[Any] = found["our trainer"]["seen"]
    assert len(batches) == STEPS
    assert len({number for batch in batches[:5] for number in batch}) == 40
    return batches


def check_parts(parts: Found, expected: list[Any]) -> None:
    assert parts["first"] == {"start": 0, "seen": expected[:STEPS_BEFORE]}
    assert parts["resumed"] == {"start": SAVED_AFTER, "seen": expected[SAVED_AFTER:]}


@pytest.mark.parametrize("way", SHORT)
def test_libais_trainer_takes_the_batches_of_ours_and_resumes_exactly(way: str, found: Found) -> None:
    check_parts(found[way], batches_of_ours(found))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "way"), [*((1, way) for way in ALONE), *((4, way) for way in LONG)])
def test_every_way_into_libai_takes_the_batches_of_ours(ranks: int, way: str, long_found: dict[int, Found]) -> None:
    check_parts(long_found[ranks][way], batches_of_ours(long_found[1]))


@pytest.mark.slow
def test_our_trainer_takes_the_same_batches_on_every_mesh(long_found: dict[int, Found]) -> None:
    assert batches_of_ours(long_found[4]) == batches_of_ours(long_found[1])


@pytest.mark.slow
def test_four_ranks_resume_from_libais_checkpoint_of_one(long_found: dict[int, Found]) -> None:
    expected = batches_of_ours(long_found[1])
    assert long_found[4]["elastic"] == {"start": SAVED_AFTER, "seen": expected[SAVED_AFTER:]}


def test_our_trainer_gives_its_mesh_to_libais_layers(short_found: Found) -> None:
    assert short_found["our trainer"]["LiBai's mesh"] == [2, 2]
    assert short_found["our pipeline"] == {"same": True, "stages": [0, 1, 1]}


def test_another_mesh_resumes_from_libais_checkpoint(short_found: Found) -> None:
    assert short_found["another mesh"] == {"start": SAVED_AFTER, "seen": batches_of_ours(short_found)[SAVED_AFTER:]}


def test_a_checkpoint_of_libai_alone_goes_on_at_the_step_it_tells(found: Found) -> None:
    case = found["checkpoint without data"]
    assert case["moved"] == {"start": SAVED_AFTER, "seen": batches_of_ours(found)[SAVED_AFTER:]}


def test_loaders_of_libai_do_what_they_did(found: Found) -> None:
    parts = found["checkpoint without data"]["libai"]
    assert parts["resumed"]["start"] == SAVED_AFTER
    assert parts["resumed"]["seen"] == parts["first"]["seen"][: STEPS - SAVED_AFTER]


def test_libais_evaluation_gets_each_sample_once_with_its_own_output(found: Found) -> None:
    assert found["evaluated"] == {"each once": True, "paired": True}


def test_the_dataset_is_made_by_the_ranks_that_read(short_found: Found) -> None:
    assert short_found["datasets made"] == {"every_rank": 4, "node": 1, "rank0": 1}


def test_the_mesh_is_libais_and_inputs_and_labels_stay_paired_on_a_pipeline(short_found: Found) -> None:
    assert short_found["pipeline"] == {"paired": [True] * 3, "sizes": [2, 1, 2], "same stages": True}


def test_a_field_made_global_by_itself_knows_of_parts_and_of_shared_memory(short_found: Found) -> None:
    assert short_found["field by field"] == {"parts": True, "own copy": True}


@pytest.mark.slow
def test_a_sample_that_fails_on_one_rank_ends_libais_job_on_all(tmp_path: Path) -> None:
    launch = launch_ranks(FAILING, 2, str(tmp_path), timeout=60, end_on_error=False)
    assert launch.returncode != 0
    assert "sample 11 of Broken" in launch.output
    assert "the disk is gone" in launch.output
