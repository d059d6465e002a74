from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import pytest

from libai_data import DataLoader
from libai_data.data.samplers import CyclicSampler, SingleRoundSampler
from libai_data.data.samplers.listed import ListedBatches, as_stream
from libai_data.errors import CheckpointError, ConfigError, SampleError
from libai_data.mesh.current import get_mesh, set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh


@pytest.fixture()
def two_data_parallel_ranks() -> Iterator[None]:
    before = get_mesh()
    set_mesh(ParallelMesh(2, 1, 1))
    yield
    set_mesh(before)


LISTS = [[3, 1], [2], [0, 5, 4]]


def test_a_users_lists_are_taken_as_they_are_round_after_round_and_all_rows_count() -> None:
    stream = as_stream(LISTS)
    for _ in range(2):
        batches = list(stream.batches(0))
        assert [batch.indices.tolist() for batch in batches] == LISTS
        places = [(batch.step, batch.position, batch.size, batch.valid) for batch in batches]
        assert places == [(0, 0, 2, 2), (1, 2, 1, 1), (2, 3, 3, 3)]
    assert len(stream) == 3


def test_rows_are_counted_over_all_data_parallel_ranks(two_data_parallel_ranks: None) -> None:
    batches = list(as_stream([[3, 1], [2]]).batches(0))
    assert [(batch.position, batch.size, batch.valid) for batch in batches] == [(0, 4, 4), (4, 2, 2)]


@pytest.mark.parametrize(("position", "left"), [(0, 3), (2, 2), (3, 1), (6, 3)])
def test_a_saved_place_is_found_again_and_behind_the_last_list_the_next_round_begins(position: int, left: int) -> None:
    stream = as_stream(LISTS)
    stream.load_state_dict({"position": position, "epoch": 2})
    assert {"position": position, "epoch": 2}.items() <= stream.state_dict().items()
    batches = list(stream.batches(stream.position))
    assert len(batches) == left
    assert {batch.epoch for batch in batches} == {2 if 0 < position < 6 else 3}


@pytest.mark.parametrize("position", [1, 4, 7])
def test_the_state_of_another_kind_and_a_position_that_no_list_begins_at_are_refused(position: int) -> None:
    stream = as_stream(LISTS)
    other_kind = CyclicSampler(range(9), 3).state_dict()
    for other in ({}, {"position": -1}, {"position": "1"}, {"position": 3, "epoch": -1}, other_kind):
        with pytest.raises(CheckpointError):
            stream.load_state_dict(other)
    stream.load_state_dict({"position": position, "epoch": 0})
    with pytest.raises(CheckpointError, match=f"its lists before position {position} of epoch 0 differ from the lists"):
        list(stream.batches(position))


class Drawn:
    """Lists drawn anew each round, as a torch sampler does that has a generator of its own."""

    def __init__(self, seed: int, has_length: bool = True) -> None:
        self._random = np.random.default_rng(seed)
        self._lists = 5
        if not has_length:
            self._lists = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._random.permutation(15).reshape(5, 3).tolist())

    def __len__(self) -> int:
        return self._lists  # None raises a TypeError, as some of torch's samplers do.


def lists_and_states(stream: Any, rounds: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Each list, and the state after it; at the end of a round, also the one that a loader keeps then."""
    found = []
    for _ in range(rounds):
        for batch in one_pass(stream):
            found.append((batch.indices.tolist(), stream.state_dict()))
        found.append(([], stream.state_dict()))
    return found


def one_pass(stream: Any) -> Iterator[Any]:
    """The batches of a pass, as a loader takes them."""
    stream.cursor = stream.next_pass()
    for batch in stream.batches(stream.position):
        stream.cursor = stream.after(batch)
        yield batch
    stream.cursor = stream.after_pass()


@pytest.mark.parametrize("make", [lambda: Drawn(3), lambda: Drawn(3, False), lambda: LISTS])
def test_a_seeded_sampler_resumes_with_the_same_lists_at_every_place_of_every_round(make: Any) -> None:
    found = lists_and_states(as_stream(make()), 3)
    whole = [lists for lists, _ in found if lists]
    taken = 0
    for lists, state in found[: len(whole) * 2 // 3 + 2]:
        taken += bool(lists)
        resumed = as_stream(make())
        resumed.load_state_dict(state)
        again = [batch.indices.tolist() for batch in resumed.batches(resumed.position)]
        assert again == whole[taken : taken + len(again)]
        assert again


@pytest.mark.parametrize("has_length", [True, False])
def test_a_sampler_that_draws_other_lists_is_refused_wherever_it_resumes(has_length: bool) -> None:
    found = lists_and_states(as_stream(Drawn(1, has_length)), 2)
    for _, state in found:
        resumed = as_stream(Drawn(2, has_length))
        resumed.load_state_dict(state)
        with pytest.raises(CheckpointError, match=r"does not replay.*Seed it.*resume_override"):
            list(resumed.batches(resumed.position))
        resumed.load_state_dict(state, override=["seed"])
        assert list(resumed.batches(resumed.position))


def test_a_state_of_an_epoch_that_was_begun_is_refused_if_the_sampler_draws_other_lists_now() -> None:
    stream = as_stream(Drawn(1))
    found = lists_and_states(stream, 3)
    for _, state in found[:-2]:
        stream.load_state_dict(state)
        with pytest.raises(CheckpointError, match="load the state into a new loader, with a new Drawn"):
            list(stream.batches(stream.position))
    stream.load_state_dict(found[-1][1])
    assert list(stream.batches(stream.position))


def test_a_list_of_lists_goes_back_to_any_state() -> None:
    stream = as_stream(LISTS)
    for _, state in lists_and_states(stream, 2):
        stream.load_state_dict(state)
        (fresh := as_stream(LISTS)).load_state_dict(state)
        again, first = ([batch.indices.tolist() for batch in each.batches(each.position)] for each in (stream, fresh))
        assert again == first != []


def test_what_has_no_length_and_perhaps_no_end_is_not_replayed() -> None:
    class Endless:
        def __iter__(self) -> Iterator[list[int]]:
            return iter(lambda: [1, 2], None)

    stopped = DataLoader([{"x": np.array(number)} for number in range(3)], Endless())
    for _ in range(2):
        next(iter(stopped))
    state = stopped.state_dict()
    assert (state["epoch"], state["rounds_ended"]) == (1, False)
    resumed = DataLoader(stopped.dataset, Endless())
    resumed.load_state_dict(state)
    assert next(iter(resumed)).x.tensor.numpy().tolist() == [1, 2]


def test_a_sampler_without_a_list_is_refused() -> None:
    class Empty:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([])

    nothing: Any
    for nothing in (Empty(), []):
        with pytest.raises(ConfigError, match="yields no list of indices"):
            list(DataLoader([{"x": np.array(0)}], nothing))


def _torch_lists(name: str, seed: int, size: int = 3, drop_last: bool = False) -> Any:
    torch = pytest.importorskip("torch")
    data = torch.utils.data
    generator = torch.Generator()
    generator.manual_seed(seed)
    samplers = {
        "weighted": lambda: data.WeightedRandomSampler([1.0] * 20, 20, generator=generator),
        "shuffled": lambda: data.RandomSampler(range(20), generator=generator),
        "distributed": lambda: data.DistributedSampler(range(20), 1, 0, shuffle=True, seed=seed),
    }
    return data.BatchSampler(samplers[name](), size, drop_last)


def _first(loader: DataLoader, count: int) -> list[list[int]]:
    """The first batches of as many passes as it takes."""
    passes = chain.from_iterable(iter(loader) for _ in range(count + 1))
    return [batch.x.tensor.numpy().tolist() for batch in islice(passes, count)]


@pytest.mark.parametrize("name", ["weighted", "shuffled", "distributed"])
def test_a_loader_with_a_sampler_of_torch_resumes_with_the_same_samples_or_refuses(name: str) -> None:
    dataset = [{"x": np.array(number)} for number in range(20)]
    whole = _first(DataLoader(dataset, _torch_lists(name, 3)), 16)
    assert len({str(batch) for batch in whole}) > 10
    for cut in (1, 4, 6, 7, 8, 13, 14):
        stopped = DataLoader(dataset, _torch_lists(name, 3))
        _first(stopped, cut)
        state = json.loads(json.dumps(stopped.state_dict()))
        resumed = DataLoader(dataset, _torch_lists(name, 3))
        resumed.load_state_dict(state)
        assert _first(resumed, 16 - cut) == whole[cut:]
        other = DataLoader(dataset, _torch_lists(name, 4))
        other.load_state_dict(state)
        if state["position"]:
            with pytest.raises(CheckpointError, match="does not replay"):
                _first(other, 1)


@pytest.mark.parametrize(("size", "drop_last"), [(3, True), (4, False)])
def test_a_sampler_that_draws_once_more_at_its_end_resumes_in_each_epoch(size: int, drop_last: bool) -> None:
    """PyTorch's RandomSampler does so. Its BatchSampler yields the last full batch before the sampler ends."""

    def loader_of() -> DataLoader:
        return DataLoader(list(range(20)), _torch_lists("shuffled", 3, size, drop_last), fields=["x"])

    def lists(loader: DataLoader) -> list[list[int]]:
        return [batch["x"].tolist() for batch in loader.numpy()]

    loader = loader_of()
    epochs = [lists(loader) for _ in range(4)]
    for epoch in range(3):
        stopped = loader_of()
        stopped.set_epoch(epoch)
        for taken in (0, 2):
            _first(stopped, taken)
            chosen, resumed, again = loader_of(), loader_of(), loader_of()
            resumed.load_state_dict(stopped.state_dict())
            again.load_state_dict(resumed.state_dict())
            assert [lists(resumed), lists(again)] == 2 * [epochs[epoch][taken:]]
            assert lists(resumed) == epochs[epoch + 1]
            chosen.set_epoch(epoch)
            again.load_state_dict(chosen.state_dict())
            assert lists(chosen) == epochs[epoch]


def test_a_sampler_whose_rounds_were_left_behind_their_last_list_resumes() -> None:
    loader = DataLoader(list(range(20)), _torch_lists("shuffled", 3, 4), fields=["x"])
    for _ in range(2):
        for _ in zip(range(5), loader.numpy()):
            pass
    next(iter(loader.numpy()))
    resumed = DataLoader(list(range(20)), _torch_lists("shuffled", 3, 4), fields=["x"])
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 4


def test_the_lists_of_another_data_parallel_rank_are_not_compared(two_data_parallel_ranks: None) -> None:
    saved = as_stream(Drawn(1))
    _, state = lists_and_states(saved, 1)[1]
    other = as_stream(Drawn(2))
    other.load_state_dict({**state, "data_parallel_rank": 1})
    assert len(list(other.batches(other.position))) == 3


class OfEpoch:
    """Lists that differ from epoch to epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as for this epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[self.epoch]])


class Around:
    """A batch sampler around another sampler, as torch's."""

    def __init__(self) -> None:
        self.sampler = OfEpoch()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.sampler)


@pytest.mark.parametrize("kind", [OfEpoch, Around])
def test_each_round_is_told_to_a_sampler_that_asks_for_it(kind: Any) -> None:
    stream = as_stream(kind())
    assert [batch.indices.tolist() for _ in range(3) for batch in one_pass(stream)] == [[0], [1], [2]]
    stream.set_epoch(5)
    assert [(batch.epoch, batch.indices.tolist()) for batch in one_pass(stream)] == [(5, [5])]


class GivesTheSameIterator:
    """Looks as if it could be iterated again."""

    def __init__(self, iterator: Iterator[Any], is_wrapped: bool) -> None:
        self._iterator = iterator
        self._is_wrapped = is_wrapped

    def __iter__(self) -> Iterator[list[int]]:
        return map(list, self._iterator) if self._is_wrapped else self._iterator


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_what_has_no_second_round_is_refused_there(is_wrapped: bool) -> None:
    stream = as_stream(GivesTheSameIterator(iter([[1], [2]]), is_wrapped))
    assert len(list(one_pass(stream))) == 2
    with pytest.raises(ConfigError, match="can be iterated only once"):
        list(one_pass(stream))


@pytest.mark.parametrize("taken", [1, 2])
def test_a_sampler_of_indices_without_a_second_round_is_refused_there(taken: int) -> None:
    loader = DataLoader([{"x": 0}] * 3, batch_size=2, sampler=GivesTheSameIterator(iter([2, 0, 1]), is_wrapped=False))
    assert len(list(islice(loader, taken))) == taken
    with pytest.raises(ConfigError, match=r"the sampler \(GivesTheSameIterator\) can be iterated only once"):
        list(loader)


def test_samplers_that_know_positions_stay_themselves() -> None:
    sampler = CyclicSampler(range(9), 3)
    assert as_stream(sampler) is sampler
    assert isinstance(as_stream([[1]]), ListedBatches)


NO_LISTS: list[Any] = [
    *(2, None, "12", {1}, {1: 2}, iter([1]), [], [0.5], [True, False], [[2]]),
    *([[1], [2, 3]], [1, [2]], [None], ["1"]),
]
NO_INDICES = [[2, -1], [2**70], np.array([2**63 + 1], np.uint64), np.array([1.0])]


@pytest.mark.parametrize("item", [*NO_LISTS, *NO_INDICES])
def test_an_item_that_is_no_list_of_indices_is_refused_by_number(item: Any) -> None:
    with pytest.raises(ConfigError, match="batch 1 of the batch_sampler is"):
        list(as_stream([[1], item]).batches(0))
    told = r"batch 1 .* is \[1, 3\], which names the index 3; the dataset has 3 samples"
    with pytest.raises(ConfigError, match=told):
        list(as_stream([[0], [1, 3]], range(3)).batches(0))


@pytest.mark.parametrize("item", [(1, 2), np.array([1, 2], np.uint8), range(1, 3), [np.int32(1), 2]])
def test_any_list_of_indices_is_taken(item: Any) -> None:
    assert [batch.indices.tolist() for batch in as_stream([item], range(3)).batches(0)] == [[1, 2]]


def lists() -> Iterator[list[int]]:
    yield [0]
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        *(
            (once, r".*can be iterated only once.*pass a list, or an object whose __iter__")
            for once in (iter([[1]]), ([each] for each in range(3)), map(list, [[1]]), zip([1], [2]))
        ),
        (3, r"is 3 \(int\); pass"),
        (CyclicSampler, "is the class CyclicSampler, which is not called"),
        (lists, "is the function lists, which is not called"),
    ],
)
def test_what_cannot_be_iterated_is_refused(sampler: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"batch_sampler {words}"):
        as_stream(sampler)


class Fails:
    """Its iterator, its length or its `set_epoch` is wrong."""

    def __init__(self, make: Any = lists, length: Any = 1) -> None:
        self.make, self.length = make, length

    def __iter__(self) -> Any:
        return self.make()

    def __len__(self) -> Any:
        return self.length


class WithoutArgument(Fails):
    def set_epoch(self) -> None: ...


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (Fails(), "KeyError: 'gone' after 1 list"),
        (Fails(lambda: 5), "TypeError: iter.* after 0 list"),
        (WithoutArgument(), r"TypeError: .*set_epoch\(\).* after 0 list"),
    ],
)
def test_what_a_sampler_raises_is_told_with_its_name_and_the_round(sampler: Any, words: str) -> None:
    with pytest.raises(SampleError, match=rf"batch_sampler \(\w+\) raised {words}.* of epoch 0"):
        list(as_stream(sampler).batches(0))


@pytest.mark.parametrize("length", [-1, 2**63, None])
def test_a_length_that_is_none_is_as_no_length(length: Any) -> None:
    stream = as_stream(Fails(lambda: iter([[0], [1]]), length))
    assert len(list(stream.batches(0))) == 2
    assert "rounds_ended" in stream.state_dict()
    loader = DataLoader([{"x": 0}] * 2, batch_sampler=stream)
    with pytest.raises(TypeError, match=r"Fails.* has no length.*give it __len__"):
        len(loader)


def test_a_sampler_of_indices_that_does_not_end_is_refused() -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            return cycle(range(8))

    with pytest.raises(ConfigError, match=r"the sampler .Endless. has not ended after 1000000 indices"):
        next(iter(DataLoader([{"x": 1}] * 8, 4, sampler=Endless())))


@pytest.mark.parametrize("sampler", [[[1, 2], [3]], [[1, 2], [3, 4]], [None, 1]])
def test_a_sampler_of_lists_is_told_from_a_batch_sampler(sampler: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"the sampler \(list\) yields no single indices; pass lists .* batch_sampler"
    ):
        list(DataLoader([{"x": number} for number in range(8)], 2, sampler=sampler).numpy())
    with pytest.raises(ConfigError, match=r"batch 0 of the sampler is .* the index 9; the dataset has 8 samples"):
        list(DataLoader([{"x": number} for number in range(8)], 2, sampler=[1, 9]).numpy())


@pytest.mark.parametrize("kind", [CyclicSampler, SingleRoundSampler])
def test_a_sampler_of_ours_with_an_iter_of_its_own_is_refused(kind: Any) -> None:
    class Reversed(kind):
        def __iter__(self) -> Iterator[list[int]]:
            return map(list, map(reversed, super().__iter__()))

    with pytest.raises(ConfigError, match=r"Reversed has an __iter__ of its own.*Do not derive Reversed"):
        DataLoader(range(12), batch_sampler=Reversed(range(12), 4))
