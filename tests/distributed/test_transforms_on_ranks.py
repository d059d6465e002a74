"""Blends, filters, packers and augmented images on four ranks: any mesh, read mode and worker count goes on with the
stream of one."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.data.transforms.pictures import encoded, photograph
from tests.distributed.launcher import found_by_ranks
from tests.distributed.scripts.transforms_on_ranks import LEGS, SCENARIOS, STEPS, loader_of, rows_of
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "transforms_on_ranks.py"


@pytest.fixture(scope="module", params=[3, slowly(len(LEGS))], ids="{} meshes".format)
def ranks(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("transforms")
    for number in range(20):
        path = folder / "images" / f"class{number % 3}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photograph()[5 * number : 5 * number + 150, : 150 + number]))
    return folder, found_by_ranks(SCRIPT, 4, folder, str(request.param), timeout=300)


@pytest.mark.parametrize("name", SCENARIOS)
def test_meshes_one_after_the_other_take_the_stream_of_one_rank(
    ranks: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    folder, found = ranks
    alone = loader_of(folder / "images", name, 1, "every_rank", 0)
    batches = iter(alone)
    for number, leg in enumerate(LEGS[: len(found[0][name])]):
        expected = [rows_of(batch) for batch in islice(batches, STEPS)]
        taken = [each[name][number][0] for each in found]
        for rank in range(4):
            assert taken[rank] == taken[rank // leg.mesh[1] * leg.mesh[1]], "tensor peers see the same samples"
        shards = taken[:: leg.mesh[1]]
        assert [[row for shard in shards for row in shard[step]] for step in range(STEPS)] == expected
        states = {each[name][number][1] for each in found}
        assert [json.loads(state) for state in states] == [json.loads(json.dumps(alone.state_dict()))]
        assert len(states.pop()) < 1024
