from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.datasets import ConcatDataset, Subset
from libai_data.errors import ConfigError

sizes = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@given(sizes)
def test_datasets_come_one_behind_the_other(sizes: list[int]) -> None:
    parts = [[(number, index) for index in range(size)] for number, size in enumerate(sizes)]
    whole = ConcatDataset(parts)
    assert [whole[index] for index in range(len(whole))] == [sample for part in parts for sample in part]


@given(st.integers(0, 20), st.data())
def test_a_part_is_a_contiguous_piece(size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    part = Subset(list(range(size)), start, stop)
    assert [part[index] for index in range(len(part))] == list(range(start, stop))


@pytest.mark.parametrize("index", [-1, 3, 100])
def test_an_index_outside_is_refused_with_the_bounds(index: int) -> None:
    # A part that took negative indices would give samples that belong to another part.
    for dataset in (ConcatDataset([[1, 2], [3]]), Subset([0, 1, 2, 3, 4], 1, 4)):
        with pytest.raises(IndexError, match=f"index {index} .*3 samples"):
            dataset[index]


def test_concatenating_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no datasets"):
        ConcatDataset([])


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 6)])
def test_a_part_that_reaches_outside_is_refused_with_the_numbers(start: int, stop: int) -> None:
    with pytest.raises(ConfigError, match=f"from {start} to {stop} .*5 samples"):
        Subset(list(range(5)), start, stop)
