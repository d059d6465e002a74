"""The text suite runs, on less work; what it compares has the same content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from libai_data.benchmark.rounds import Scale, measure
from libai_data.benchmark.suites import text
from libai_data.datasets.gpt import GPTDataset
from libai_data.sources import IndexedSource


@pytest.mark.slow
def test_each_row_is_measured_and_a_small_index_takes_little(tmp_path: Path) -> None:
    for row in text.rows(Scale(quick=True, seconds=0.02, folder=tmp_path)):
        if row.name == "gpt-2":
            continue  # OneFlow's loader beside ours is measured by the loader's suite as well, and takes long to start
        measured = measure(row, 1, lambda _: None, settle=0)
        assert all(values[0] > 0 for values in measured.values.values())
        if row.name.startswith("index"):
            assert all(claim.judge(measured.values, measured.missing).met for claim in row.claims)


def test_the_samples_that_are_compared_are_the_same(tmp_path: Path) -> None:
    prefix = text.write_corpus(tmp_path / "corpus", 10**5)
    ours, theirs = GPTDataset(prefix, text.LENGTH), text.FlowSamples(IndexedSource(prefix))
    assert len(ours) == len(theirs) > 50
    for index in (0, 7, len(ours) - 1):
        for name, field in theirs[index].get_fields().items():
            np.testing.assert_array_equal(ours[index].get(name).tensor, field.tensor.numpy())


def test_the_synthesised_lengths_are_an_index_like_any_other(tmp_path: Path) -> None:
    source = IndexedSource(text.write_lengths(tmp_path / "many", 1000))
    assert source.num_documents == 1000
    assert 0.9e6 < len(source.tokens) < 1.1e6
