"""Of ranks that use different batches in one collective, the last one notices it; of equal ones, none does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.mesh.peers.batch_notes import BatchNotes, BatchPlace, different_batches, shared_memory
from tests.properties import examples


@contextmanager
def notes_of(ranks: int) -> Iterator[list[BatchNotes]]:
    descriptor = shared_memory(ranks)
    try:
        yield [BatchNotes(descriptor, rank, ranks) for rank in range(ranks)]
    finally:
        os.close(descriptor)


def place(step: int) -> BatchPlace:
    return step, step // 10, 8 * step, 8, 8, 1, 0


@settings(max_examples=examples(50))
@given(ranks=st.integers(2, 9), data=st.data())
def test_the_last_of_ranks_that_use_different_batches_notices_it_and_equal_ones_never_do(
    ranks: int, data: st.DataObject
) -> None:
    odd, skips_at, steps = (data.draw(st.integers(0, most)) for most in (ranks, 70, 70))  # `odd` may be no rank
    with notes_of(ranks) as notes:
        for number in range(1, steps + 2):
            noticed = []
            for rank in data.draw(st.permutations(range(ranks))) if number > steps - 3 else range(ranks):
                step = number + (rank == odd and number >= skips_at)
                other = notes[rank].note(number, place(step))
                if other is not None:
                    noticed.append((rank, other))
                    assert notes[rank].place_of(other, number) == place(number + (other == odd))
            assert bool(noticed) == (odd < ranks and number >= skips_at)
            assert all(odd in pair for pair in noticed)


def test_ranks_that_are_far_apart_compare_nothing_until_they_are_near_again() -> None:
    with notes_of(2) as (ahead, behind):
        for number in range(1, 300):
            assert ahead.note(number, place(number)) is None
        for number in range(1, 236):
            assert behind.note(number, place(number + 1)) is None
        assert behind.note(236, place(237)) == 0


def test_the_error_names_the_ranks_and_their_batches() -> None:
    words = different_batches({0: place(3), 2: place(3), 1: (4, 0, 32, 8, 5, 1, 0), 3: None})
    assert (
        "step 3 of the loader (epoch 0, position 24, 8 rows) on rank 0 2, but step 4 of the loader (epoch 0, position "
        "32, 5 of 8 rows) on rank 1, but no batch on rank 3."
    ) in words
