"""A resume on 4 ranks whose data has changed is exact, or ends with a clear error on every rank."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, Callable

import pytest

from libai_data.iterables import from_iterable
from tests.distributed.launcher import found_by_ranks
from tests.distributed.scripts.resume_changed_data import CHANGES, KINDS, READERS
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "resume_changed_data.py"
MESHES = ["2x2x1", slowly("4x1x1")]
Results = Callable[[str], list[dict[str, Any]]]

ALTERED = ("reordered", "a field added", "another transform")

SAID = {
    "by index": {"grew": "samples was 40 and is now 46", "shrank": "samples was 40 and is now 34"},
    "by index, hashed": dict.fromkeys(ALTERED, "dataset's samples was '.*' and is now"),
    "by index, named": dict.fromkeys(ALTERED, "dataset's content was .* and is now"),
    "with a state": dict.fromkeys((*ALTERED, "grew at the front"), "rows 8 to 11 of epoch 0 differ"),
    "replayed": dict.fromkeys((*ALTERED, "grew at the front"), "does not replay: the first 12 rows of epoch 0 differ"),
}
"""What the error of a change says; of other changes, there is none, and the same samples follow."""


def said(kind: str, name: str) -> str:
    """What the error of a change says; "" if there is none."""
    if name == "grew at the front" and kind.startswith("by index"):
        return "samples was 40 and is now 41"
    return SAID[kind].get(name) or SAID["by index" if kind.startswith("by index") else kind].get(name, "")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    @cache
    def found(mesh: str) -> list[dict[str, Any]]:
        return found_by_ranks(SCRIPT, 4, tmp_path_factory.mktemp("changed"), mesh, timeout=150)

    return found


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_changed_data_is_resumed_exactly_or_refused_on_every_rank(kind: str, mesh: str, results: Results) -> None:
    for name in CHANGES:
        for readers in READERS:
            for rank, each in enumerate(results(mesh)):
                found, same = (each[f"{kind}, {case}, {readers}"] for case in (name, "the same"))
                assert isinstance(same, list), same
                if message := said(kind, name):
                    assert re.search(message, str(found)), (name, readers, rank, found)
                elif name != "reordered":
                    assert found == same, (name, readers, rank)
                else:  # Nothing tells the loader that an index means another sample.
                    assert found == [[39 - number for number in batch] for batch in same]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_samples_after_the_state_are_those_of_one_rank(kind: str, mesh: str, results: Results) -> None:
    stream = from_iterable([{"number": number} for number in range(40)], 4, shuffle=kind.startswith("by"), seed=3)
    expected = [number for batch, _ in zip(stream, range(5)) for number in batch["number"].numpy().tolist()][12:]
    stream.close()
    shards = results(mesh)[:: int(mesh[2])]
    for readers in READERS:
        parts = zip(*(each[f"{kind}, the same, {readers}"] for each in shards))
        assert [number for batch in parts for part in batch for number in part] == expected


@pytest.mark.parametrize("mesh", MESHES)
def test_a_training_on_changed_data_is_refused_on_every_rank(mesh: str, results: Results) -> None:
    for each in results(mesh):
        assert "samples was 40 and is now 46" in each["trainings"]["grew"]
        assert "samples was 40 and is now 34" in each["trainings"]["shrank"]
        assert "dataset's name was 'TinyDataset' and is now 'WithExtra'" in each["trainings"]["a field added"]
