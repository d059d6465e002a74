from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from libai_data.errors import CheckpointError, ConfigError
from libai_data.mesh import ParallelMesh, get_mesh, set_mesh
from libai_data.samplers import CyclicSampler
from libai_data.samplers.listed import ListedBatches, as_stream


@pytest.fixture()
def two_data_parallel_ranks() -> Iterator[None]:
    before = get_mesh()
    set_mesh(ParallelMesh(2, 1, 1))
    yield
    set_mesh(before)


def test_a_users_lists_are_taken_as_they_are_round_after_round() -> None:
    stream = as_stream([[3, 1], [2], [0, 5, 4]])
    for _ in range(2):
        assert [batch.indices.tolist() for batch in stream.batches(0)] == [[3, 1], [2], [0, 5, 4]]
    assert len(stream) == 3


def test_each_round_from_the_beginning_is_a_new_epoch_and_a_resumed_one_is_not() -> None:
    stream = as_stream([[3, 1], [2]])
    assert [[batch.epoch for batch in stream.batches(0)] for _ in range(2)] == [[0, 0], [1, 1]]
    resumed = as_stream([[3, 1], [2]])
    resumed.load_state_dict({**stream.state_dict(), "position": 2})
    assert [batch.epochs.tolist() for batch in resumed.batches(2)] == [[1]]


def test_all_rows_count_and_positions_follow_each_other() -> None:
    batches = list(as_stream([[3, 1], [2], [0, 5, 4]]).batches(0))
    assert [(batch.step, batch.position, batch.size, batch.valid) for batch in batches] == [
        (0, 0, 2, 2),
        (1, 2, 1, 1),
        (2, 3, 3, 3),
    ]


def test_rows_are_counted_over_all_data_parallel_ranks(two_data_parallel_ranks: None) -> None:
    batches = list(as_stream([[3, 1], [2]]).batches(0))
    assert [(batch.position, batch.size, batch.valid) for batch in batches] == [(0, 4, 4), (4, 2, 2)]


@pytest.mark.parametrize(("position", "left"), [(0, 3), (2, 2), (3, 1), (6, 0)])
def test_a_saved_place_is_found_again(position: int, left: int) -> None:
    stream = as_stream([[3, 1], [2], [0, 5, 4]])
    stream.load_state_dict({"position": position, "epoch": 2})
    assert stream.state_dict() == {"position": position, "epoch": 2}
    assert len(list(stream.batches(stream.position))) == left


@pytest.mark.parametrize("state", [{}, {"position": -1}, {"position": "1"}, CyclicSampler(range(9), 3).state_dict()])
def test_the_state_of_another_kind_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError):
        as_stream([[1]]).load_state_dict(state)


def test_samplers_that_know_positions_stay_themselves() -> None:
    sampler = CyclicSampler(range(9), 3)
    assert as_stream(sampler) is sampler
    assert isinstance(as_stream(iter([[1]])), ListedBatches)


@pytest.mark.parametrize("batches", [[[1], 2], [[1], []]])
def test_an_item_that_is_no_list_of_indices_is_refused_by_number(batches: Any) -> None:
    with pytest.raises(ConfigError, match="batch 1 of the batch_sampler is"):
        list(as_stream(batches).batches(0))


def test_what_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(TypeError, match="batch_sampler is a int"):
        as_stream(3)
