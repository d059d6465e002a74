from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.engine.step_plan import complete_batch_sizes
from libai_data.errors import ConfigError

sizes = st.integers(1, 64)


@given(sizes, sizes, sizes, st.integers(0, 4))
def test_any_two_sizes_determine_the_third(micro: int, steps: int, data_parallel: int, open_key: int) -> None:
    whole = micro * steps * data_parallel
    given_sizes: list = [micro, whole, steps]
    if open_key < 3:
        given_sizes[open_key] = None
    found = complete_batch_sizes(given_sizes[0], given_sizes[1], given_sizes[2], data_parallel)
    assert (found.micro_batch_size, found.num_accumulation_steps, found.global_batch_size) == (micro, steps, whole)


@given(sizes, sizes)
def test_one_batch_size_alone_means_no_accumulation(size: int, data_parallel: int) -> None:
    assert complete_batch_sizes(size, None, None, data_parallel).num_accumulation_steps == 1
    assert complete_batch_sizes(None, size * data_parallel, None, data_parallel).micro_batch_size == size


@pytest.mark.parametrize(
    ("micro", "whole", "steps", "named"),
    [
        (None, None, None, "neither"),
        (4, 30, None, "4 x 2 = 8"),
        (None, 30, 4, "4 x 2 = 8"),
        (None, 31, None, "1 x 2 = 2"),
        (4, 30, 2, "4 x 2 x 2 = 16"),
        (0, None, None, "train_micro_batch_size is 0"),
        (4, None, 1.5, "num_accumulation_steps is 1.5"),
        (None, True, None, "global_batch_size is True"),
    ],
)
def test_sizes_that_contradict_are_refused_with_the_numbers(
    micro: int | None, whole: int | None, steps: int | None, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        complete_batch_sizes(micro, whole, steps, 2)
