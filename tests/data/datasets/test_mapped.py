from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from libai_data.data.datasets import ConcatDataset, FilteredDataset, Map, RandomMap
from libai_data.data.random.sample_random import reading_samples
from libai_data.data.samplers import CyclicSampler
from tests.loader.sample_datasets import Numbers
from tests.loader.streams import WORKER_NAMES, WORKERS, stream


def negative(sample: Any) -> dict[str, Any]:
    return {"index": -sample.index.tensor}


def noisy(sample: Any, generator: np.random.Generator) -> dict[str, Any]:
    return {"index": sample["index"], "noise": [*sample.get("noise", np.zeros(0)), generator.random()]}


def is_even(sample: Any) -> bool:
    return int(sample["index"]) % 2 == 0


def test_each_sample_is_what_the_function_makes_of_it() -> None:
    dataset = Map(Numbers(), negative)
    assert len(dataset) == 64 and [int(dataset[index]["index"]) for index in (0, 5)] == [0, -5]


@pytest.mark.parametrize("workers", WORKERS[1:], ids=WORKER_NAMES[1:])
def test_what_is_drawn_is_the_same_whoever_reads(workers: dict[str, Any]) -> None:
    dataset = RandomMap(RandomMap(Map(Numbers(8), negative), noisy), noisy)
    expected = stream(dataset, batches=4)
    assert stream(dataset, batches=4, **workers) == expected
    assert len({fields["noise"][2] for _, fields in expected}) == 4, "each epoch draws anew"


def test_maps_below_each_other_and_other_seeds_draw_other_numbers() -> None:
    dataset = RandomMap(RandomMap(Map(Numbers(8), negative), noisy), noisy)
    found = []
    for key in ((1, 0, 3), (1, 1, 3), (2, 0, 3), (1, 0, 4)):
        with reading_samples((key,)):
            found.extend(dataset[key[2]]["noise"])
    assert len(set(found)) == 8


def test_maps_go_with_what_else_is_made_of_datasets() -> None:
    dataset = FilteredDataset(ConcatDataset([Map(Numbers(), negative), Map(Numbers(), negative)]), is_even)
    (_, fields), *_ = stream(dataset, CyclicSampler(dataset, 4), batches=1)
    assert np.frombuffer(fields["index"][2], np.int64).tolist() == [0, -2, -4, -6]


def test_a_map_has_the_fingerprint_of_what_it_maps() -> None:
    assert Map(Numbers(), negative).fingerprint() == {"name": "Numbers"}
    assert RandomMap(Map(Numbers(), negative), noisy).fingerprint() == {"name": "Map", "content": {"name": "Numbers"}}
