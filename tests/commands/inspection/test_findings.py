"""What is wrong with samples is found and named, and what is right is not."""

from __future__ import annotations

import numpy as np
import pytest

from libai_data.commands.inspection import inspect_config
from libai_data.commands.inspection.findings import histograms
from libai_data.commands.inspection.step_rows import StepRows
from libai_data.config import LazyCall
from libai_data.data.samplers import Order
from tests.commands.inspection.data import Planted, Sentences, config_with


def found_in(what: str, length: int = 8) -> list[str]:
    return inspect_config(config_with(LazyCall(Planted)(what=what, length=length))).findings


def test_nothing_is_found_in_sound_samples() -> None:
    assert found_in("") == []
    assert inspect_config(config_with(LazyCall(Sentences)())).findings == []


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nan", "Field 'points' has 1 number(s) that are NaN, in sample 3 (row "),
        ("inf", "Field 'points' has 1 number(s) that are infinite, in sample 3 (row "),
        ("label", "Field 'labels' is out of range: the model has 3 classes, 0 to 2; found 7 in sample 3 (row "),
        ("negative", "Field 'labels' is out of range: the model has 3 classes, 0 to 2; found -1 in sample 3 (row "),
        ("token", "'input_ids' is out of range: the model has 20 tokens, 0 to 19; found 53, 54, 55, 56, 57, ... in "),
        ("constant", "Field 'scale' is constant: each of its numbers, in all rows read, is 2.5."),
        ("duplicate", "Duplicated sample: sample "),
    ],
)
def test_a_planted_fault_is_found_and_is_the_only_one(what: str, words: str) -> None:
    (found,) = found_in(what)
    assert words in found
    if what == "duplicate":
        assert "sample 0 (row " in found and "sample 5 (row " in found and "are equal in every field" in found


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint64", "float16", "float32", "float64"])
def test_a_histogram_counts_each_number_once_up_to_the_largest_of_its_dtype(dtype: str) -> None:
    limits = np.finfo(dtype) if dtype.startswith("float") else np.iinfo(dtype)
    values = [np.array(each, dtype) for each in (limits.min, limits.max, *np.linspace(limits.min / 2, limits.max / 2))]
    rows = StepRows(0, 0, len(values), len(values), values={"x": values})
    (bars,) = histograms(rows, {}).values()
    counts = [count for _, count in bars]
    assert sum(counts) == len(values) and counts[0] > 0 and counts[-1] > 0


def test_a_sample_that_comes_twice_within_a_step_is_explained_by_the_epochs() -> None:
    indices = Order(12, 1234).locate(8 + np.arange(8))[1].tolist()
    twice = {index for index in indices if indices.count(index) == 2}
    found = inspect_config(config_with(LazyCall(Planted)(length=12)), step=1).findings
    assert len(found) == len(twice) > 0
    for index in twice:
        (own,) = [each for each in found if f" sample {index} (row " in each]
        assert "The step continues into the next epoch." in own


def test_a_field_that_the_mesh_cannot_split_is_found() -> None:
    cfg = config_with(LazyCall(Sentences)(), tensor_parallel_size=5)
    found = inspect_config(cfg).findings
    assert len(found) == 2 and all("cannot become a global tensor on this mesh" in each for each in found)
    assert "'input_ids'" in found[0] and "dim 1 of size 12 cannot be split evenly into 5 parts" in found[0]
