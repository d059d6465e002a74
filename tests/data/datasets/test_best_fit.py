"""Best fit: every piece in one sample, as a loop would put it, and samples that are nearly full."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.datasets import best_fit as module
from libai_data.data.datasets.best_fit import best_fit
from tests.data.samplers.transforms import packed_by_loop


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.sampled_from([4, 16, 1024]))
def test_samples_are_those_of_a_loop_in_each_window(lengths: list[int], window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_LEAST", "_MOST"):
            patch.setattr(module, name, window)
        patch.setattr(module, "_WINDOWS_AT_ONCE", 2)
        order, firsts = best_fit(np.array(lengths), 20)
    found = [order[start:stop].tolist() for start, stop in zip(firsts, firsts[1:])]
    expected = []
    for first in range(0, len(lengths), window):
        samples = packed_by_loop(lengths[first : first + window], 20)
        expected += [[first + number for number in sample] for sample in samples]
    assert found == expected


@pytest.mark.parametrize("room", [4096, 8192])
def test_98_percent_of_packed_samples_are_tokens_on_web_like_lengths(room: int) -> None:
    random = np.random.default_rng(0)
    documents = np.maximum(random.lognormal(6.3, 1.2, 50_000).astype(np.int64), 1)
    lengths = np.concatenate(
        [[room] * (each // room) + [each % room] * (each % room > 0) for each in documents.tolist()]
    )
    start = time.process_time()
    order, firsts = best_fit(lengths, room)
    assert time.process_time() - start < 5
    assert sorted(order.tolist()) == list(range(len(lengths)))
    used = np.add.reduceat(lengths[order], firsts[:-1])
    assert used.max() <= room
    assert used.sum() / (len(used) * room) > 0.98


def test_short_pieces_fill_samples_too() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 30_000)
    _, firsts = best_fit(lengths, 8192)
    assert lengths.sum() / ((len(firsts) - 1) * 8192) > 0.98
    assert best_fit(np.zeros(0, np.int64), 8)[1].tolist() == [0]
