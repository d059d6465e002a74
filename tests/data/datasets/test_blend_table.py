"""The table of a blend: what the stream takes of each dataset, counted on the stream itself."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data import CyclicSampler
from libai_data.data.datasets import BlendedDataset, GPTDataset
from libai_data.data.datasets.blend_table import log_blend, samples_taken
from tests.data.datasets.gpt_corpora import write


def rows(count: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.array([number])} for number in range(count)]


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=3),
    st.integers(1, 60),
    st.integers(1, 40),
)
def test_samples_taken_are_those_of_the_stream(weights: list[int], change: int, samples: int) -> None:
    sizes = [5, 11, 7][: len(weights)]
    blend = BlendedDataset([rows(size) for size in sizes], weights, {change: weights[::-1]})
    stream = iter(CyclicSampler(blend, 1, shuffle=False))
    ends = np.cumsum(sizes)
    counts = np.zeros(len(sizes))
    for _ in range(samples):
        counts[np.searchsorted(ends, next(stream)[0], side="right")] += 1
    taken = samples_taken(blend.blend, samples)
    assert sum(taken) == samples
    assert np.abs(counts - np.array(taken, float)).max() < 2


def test_the_table_names_corpora_and_a_small_one_that_repeats_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = GPTDataset(write(tmp_path / "large", [[*range(1, 802)]]), 8)
    small = GPTDataset(write(tmp_path / "small", [[*range(1, 82)]]), 8)
    with caplog.at_level(logging.INFO):
        log_blend(BlendedDataset([large, small], [1, 1]), 100, lambda step: 4 * step)
    told = [" ".join(line.split()) for line in caplog.text.splitlines()]
    assert any(line.endswith(f"{tmp_path}/large 100 801 50.0 % 0.50") for line in told)
    assert any(line.endswith(f"{tmp_path}/small 10 81 50.0 % 5.00") for line in told)
    assert f"sees {tmp_path}/small 5.0 times" in caplog.text
    caplog.clear()
    # From step 5 on, place 20, the small one is left out.
    with caplog.at_level(logging.INFO):
        log_blend(BlendedDataset([large, small], [1, 1], changes_at_steps={5: [1, 0]}), 100, lambda step: 4 * step)
        log_blend(rows(3), 100, lambda step: step)
    assert "1.00" in caplog.text and "more than" not in caplog.text
