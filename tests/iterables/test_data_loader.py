"""`DataLoader` takes PyTorch's arguments, and gives the batches of PyTorch's DataLoader."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, get_origin

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data import DataLoader, from_iterable, get_worker_info, to_global
from libai_data.data.random.global_generators import warn_once
from libai_data.data.samplers import CyclicSampler
from libai_data.errors import CheckpointError, ConfigError, SampleError
from libai_data.iterables.iterable_loader import indexed_dataset_of
from libai_data.iterables.packed_stream import FilteredStream, MappedStream
from libai_data.mesh.current import set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.structures import batch_info
from tests.iterables.rows import Batched
from tests.loader.test_fields import plain
from tests.properties import slowly

torch: Any = pytest.importorskip("torch")


class Sample(NamedTuple):
    image: Any
    label: int
    name: str


class Pictures(torch.utils.data.Dataset):
    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return Sample(torch.full((2, 2), float(index)), index % 3, f"{index}.png")


def theirs(**arguments: Any) -> list[Any]:
    loader = torch.utils.data.DataLoader(Pictures(), **arguments)
    # Strings of named tuples come as tuples, those of dicts as lists.
    found = [plain(batch._asdict() if isinstance(batch, Sample) else batch) for batch in loader]
    return [{key: list(value) for key, value in batch.items()} for batch in found]


def ours(**arguments: Any) -> list[Any]:
    loader = DataLoader(Pictures(), **arguments)
    batches = [plain(dict(batch)) for batch in loader]
    assert len(loader) == len(batches)
    return batches


def collate(samples: list[Any]) -> dict[str, Any]:
    return {"labels": torch.tensor([sample.label for sample in samples]), "names": [sample.name for sample in samples]}


# The trainer decides which samples a batch has; workers make the batches of each kind.
SAMPLED = {"batch_size": 3, "sampler": [7, 1, 1, 9, 0]}
COLLATED = {"batch_size": 4, "collate_fn": collate}
BATCHED = {"batch_sampler": [[3, 1], [0, 0, 5]]}


@pytest.mark.parametrize(
    ("arguments", "num_workers"),
    [
        ({}, 0),
        ({"batch_size": 4}, 0),
        ({"batch_size": 4, "drop_last": True}, 0),
        ({"batch_size": 2, "sampler": torch.utils.data.SequentialSampler(Pictures()), "drop_last": True}, 0),
        ({"batch_size": 4, "pin_memory": False, "timeout": 0}, 0),
        *((arguments, 0) for arguments in (SAMPLED, COLLATED, BATCHED)),
        *(slowly(arguments, 2) for arguments in (SAMPLED, COLLATED, BATCHED)),
    ],
)
def test_batches_are_those_of_pytorch(arguments: dict[str, Any], num_workers: int) -> None:
    assert ours(num_workers=num_workers, **arguments) == theirs(**arguments)


class Unmeasured:
    """It has no `__len__`: the sampler knows which samples there are. That it can be iterated over does not matter."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, index: int) -> Any:
        return Pictures()[index]


@pytest.mark.parametrize(
    "arguments", [{"batch_size": 2, "sampler": torch.utils.data.SequentialSampler(Pictures(7))}, {"sampler": [3, 0, 3]}]
)
def test_a_sampler_of_a_dataset_without_a_length_decides_what_is_read(arguments: dict[str, Any]) -> None:
    loader = DataLoader(Unmeasured(), **arguments)
    expected = theirs(**arguments)
    assert len(loader) == len(expected)
    batches = iter(loader)
    first = plain(dict(next(batches)))
    resumed = DataLoader(Unmeasured(), **arguments)
    resumed.load_state_dict(loader.state_dict())
    assert [first, *(plain(dict(batch)) for batch in resumed)] == expected
    with pytest.raises(ConfigError, match=r"\[9223372036854775807\]\); an index must be below 9223372036854775807"):
        next(iter(DataLoader(Unmeasured(), sampler=[2**63 - 1])))


def test_fields_of_named_tuples_are_attributes_of_their_global_batch() -> None:
    batch: Any = to_global(next(iter(DataLoader(Pictures(), batch_size=4))))
    image, label, name = batch
    assert (batch.image.numpy() == image.numpy()).all()
    assert batch.label.numpy().tolist() == label.numpy().tolist() == [0, 1, 2, 0]
    assert batch.name == name and batch.label.is_global
    with pytest.raises(AttributeError, match=r"no field 'lable'.* Did you mean 'label'"):
        batch.lable  # noqa: B018


@given(size=st.integers(1, 30), batch_size=st.integers(1, 12), drop_last=st.booleans(), seed=st.integers(0, 9))
def test_each_pass_of_a_shuffled_loader_is_an_epoch_of_its_own(
    size: int, batch_size: int, drop_last: bool, seed: int
) -> None:
    if drop_last and batch_size > size:
        return
    dataset = [{"n": number} for number in range(size)]
    loader = DataLoader(
        dataset, batch_size, shuffle=True, drop_last=drop_last, generator=torch.Generator().manual_seed(seed)
    )
    epochs = [[batch["n"].numpy().tolist() for batch in loader] for _ in range(2)]
    for epoch in epochs:
        rows = [row for batch in epoch for row in batch]
        assert [len(batch) for batch in epoch[:-1]] == [batch_size] * (len(epoch) - 1)
        assert len(rows) == len(set(rows)) == (size // batch_size * batch_size if drop_last else size)
    assert size < 8 or epochs[0] != epochs[1]
    assert loader.state_dict()["seed"] == seed


def stream(shard: int = 0, num_shards: int = 1) -> Iterator[Any]:
    for number in range(shard, 10, num_shards):
        yield {"n": number, "name": str(number)}


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return stream()


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_list_that_returns_other_items_by_index_is_read_by_index(kind: Any, num_workers: int) -> None:
    doubled = type("Doubled", (kind,), {"__getitem__": lambda self, index: {"x": 2 * kind.__getitem__(self, index)}})
    loader = DataLoader(doubled(range(6)), 3, num_workers=num_workers, worker_type="thread")
    assert [batch["x"].tolist() for batch in loader.numpy()] == [[0, 2, 4], [6, 8, 10]]


@pytest.mark.parametrize("collate_fn", [None, collate])
def test_an_error_of_a_collator_names_the_users(collate_fn: Any) -> None:
    name = "default_collate" if collate_fn is None else "collate"
    with pytest.raises(SampleError, match=rf"collate_fn {name} of samples \[0, 1\]"):
        next(iter(DataLoader(lambda: iter([{1, 2}] * 4), 2, collate_fn=collate_fn)))


def test_an_iterable_dataset_is_read_in_its_order() -> None:
    batches = [plain(dict(batch)) for batch in DataLoader(Numbers(), batch_size=4)]
    assert batches == [plain(batch) for batch in torch.utils.data.DataLoader(Numbers(), batch_size=4)]


@pytest.mark.parametrize("arguments", [{}, {"num_shards": 2}, slowly({"num_shards": 2, "num_workers": 2})])
def test_a_dataset_of_batches_by_index_ends_by_its_length_and_is_shuffled(arguments: dict[str, Any]) -> None:
    in_order = [[3 * index, 3 * index + 1, 3 * index + 2] for index in range(6)]
    loader = DataLoader(Batched(6), batch_size=None, **arguments)
    assert [batch["n"].numpy().tolist() for batch in loader] == in_order
    shuffled = DataLoader(Batched(6), batch_size=None, shuffle=True, seed=1, **arguments)
    epochs = [[batch["n"].numpy().tolist() for batch in shuffled] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == in_order
    assert epochs[0] != epochs[1] != in_order
    next(iter(shuffled))
    resumed = DataLoader(Batched(6), batch_size=None, shuffle=True, seed=1, **arguments)
    resumed.load_state_dict(shuffled.state_dict())
    third = [batch["n"].numpy().tolist() for batch in resumed]
    shuffled.set_epoch(2)
    assert third == [batch["n"].numpy().tolist() for batch in shuffled][1:]


class Asking(Pictures):
    def __init__(self) -> None:
        import oneflow.utils.data

        super().__init__()
        self.ask = torch.utils.data.get_worker_info, oneflow.utils.data.get_worker_info, get_worker_info

    def __getitem__(self, index: int) -> Any:
        infos: Any = tuple(ask() for ask in self.ask)
        if infos == (None, None, None):
            return {"worker": -1, "of": 0, "told": 0, "seen": 0}
        (info,) = {(info.id, info.num_workers) for info in infos}
        dataset = infos[0].dataset
        assert isinstance(dataset, Asking) and all(info.dataset is dataset for info in infos)
        return {"worker": info[0], "of": info[1], "told": int(os.environ["TOLD"]), "seen": dataset.seen}


def tell(number: int) -> None:
    os.environ["TOLD"] = str(100 + number)
    torch.utils.data.get_worker_info().dataset.seen = 7 + number


def refuse(number: int) -> None:
    raise OSError(f"worker {number} finds no licence")


@pytest.mark.parametrize("context", ["fork", slowly("spawn")])
def test_workers_are_prepared_and_know_which_they_are_from_pytorch_and_oneflow_too(context: str) -> None:
    with_two: dict[str, Any] = {"batch_size": 5, "num_workers": 2, "multiprocessing_context": context}
    loader = DataLoader(Asking(), worker_init_fn=tell, **with_two)
    for batch in loader:
        assert (batch["told"] == batch["worker"] + 100).all() and (batch["seen"] == batch["worker"] + 7).all()
        assert (batch["of"] == 2).all()
    loader.close()
    assert get_worker_info() is None
    assert all((batch["worker"] == -1).all() for batch in DataLoader(Asking(), 5))
    with pytest.raises(SampleError, match=r"(?s)worker_init_fn: OSError: worker \d finds no licence.*Traceback"):
        next(iter(DataLoader(Asking(), worker_init_fn=refuse, **with_two)))


class Unseeded(torch.utils.data.Sampler):
    """Another order in each process, and in each run."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(self.size), self.size))


def test_a_sampler_with_a_generator_resumes_and_one_without_is_refused() -> None:
    def loader_of(sampler: Any) -> Any:
        return DataLoader(Pictures(), batch_size=3, sampler=sampler)

    def seeded() -> Any:
        return torch.utils.data.WeightedRandomSampler(
            [1.0] * 9 + [20.0], 10, generator=torch.Generator().manual_seed(1)
        )

    loader = loader_of(seeded())
    epochs = [[plain(dict(batch)) for batch in loader] for _ in range(3)]
    assert epochs[0] != epochs[1]
    resumed = loader_of(seeded())
    list(resumed)
    batches = iter(resumed)
    assert [plain(dict(next(batches))) for _ in range(2)] == epochs[1][:2]
    again = loader_of(seeded())
    again.load_state_dict(resumed.state_dict())
    assert [plain(dict(batch)) for batch in again] == epochs[1][2:]
    assert [plain(dict(batch)) for batch in again] == epochs[2]
    loose = loader_of(Unseeded(10))
    next(iter(loose))
    other = loader_of(Unseeded(10))
    other.load_state_dict(loose.state_dict())
    with pytest.raises(CheckpointError, match=r"does not replay.*train.resume_override=\[seed\]"):
        next(iter(other))


def test_a_resume_of_a_sampler_with_another_batch_size_is_refused_with_the_remedy() -> None:
    stopped, other = (DataLoader(Pictures(), batch_size=size, sampler=range(10)) for size in (2, 4))
    batches = iter(stopped)
    assert len([next(batches), next(batches)]) == 2
    other.load_state_dict(stopped.state_dict())
    with pytest.raises(CheckpointError, match="Use the global batch size of the checkpoint, on any mesh"):
        next(iter(other))


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_notes_arguments_without_an_effect(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    set_mesh(ParallelMesh(2, 1, 1, rank=rank))
    try:
        DataLoader(Pictures(), batch_size=2, pin_memory=True)
    finally:
        set_mesh(None)
    assert ("pin_memory is not needed" in caplog.text) == (rank == 0)


def test_weights_take_the_place_of_a_weighted_sampler(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    sampler = torch.utils.data.WeightedRandomSampler([0.0] * 8 + [1.0, 3.0], 400)
    loose = DataLoader(Pictures(), batch_size=90, sampler=sampler)
    assert "weights=sampler.weights" in caplog.text
    next(iter(loose))
    again = DataLoader(Pictures(), batch_size=90, sampler=sampler)
    again.load_state_dict(loose.state_dict())
    with pytest.raises(CheckpointError, match="remove it and set weights="):
        next(iter(again))
    arguments: dict[str, Any] = {"batch_size": 30, "weights": sampler.weights, "num_samples": sampler.num_samples}
    loader = DataLoader(Pictures(), **arguments)
    epochs = [[plain(dict(batch)) for batch in loader] for _ in range(2)]
    labels = [label for batch in epochs[0] for label in batch["label"]]
    assert len(labels) == 400 and 60 < labels.count(8 % 3) < 140 and labels.count(9 % 3) == 400 - labels.count(8 % 3)
    assert epochs[0] != epochs[1]
    batches = iter(loader)
    expected = [plain(dict(next(batches))) for _ in range(3)]
    resumed = DataLoader(Pictures(), **arguments)
    resumed.set_epoch(2)
    assert [plain(dict(batch)) for _, batch in zip(range(2), resumed)] == expected[:2]
    last = DataLoader(Pictures(), **arguments)
    last.load_state_dict(resumed.state_dict())
    assert plain(dict(next(iter(last)))) == expected[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ({"dataset": Numbers(), name: value}, f"{name}=.* is for sources that give samples by their index")
            for name, value in (("shuffle", True), ("weights", [1] * 10))
        ),
        *(
            ({"dataset": source, name: value}, f"{told} a stream without an index; remove {name}")
            for source, told in ((iter(()), "is"), (Numbers(), "but Numbers is"))
            for name, value in (("sampler", [0]), ("batch_sampler", [[0]]))
        ),
        ({"weights": [1] * 10, "sampler": [0]}, "sampler already decides weights; remove weights"),
        ({"num_samples": 3, "batch_sampler": [[0]]}, "batch_sampler already decides num_samples"),
        ({"shuffle": True, "sampler": [0]}, "sampler already decides shuffle; remove shuffle"),
        (
            {"batch_size": 2, "drop_last": True, "batch_sampler": [[0]]},
            "batch_sampler already decides batch_size and drop_last",
        ),
        ({"batch_size": 2, "global_batch_size": 4}, "global_batch_size already decides batch_size"),
        ({"batch_size": None, "sampler": [0]}, "give a batch_size"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"shuffle": "yes"}, "shuffle is 'yes'"),
        ({"sampler": iter([0])}, "can be iterated only once"),
        ({"sampler": 3}, r"sampler is 3 \(int\); pass CyclicSampler.* whose __iter__ yields indices, again"),
        ({"sampler": list}, "sampler is the class list, which is not called"),
        ({"batch_sampler": 3}, r"batch_sampler is 3 \(int\); pass .* yields lists of indices, again for each epoch"),
        ({"sampler": [0], "readers": "node"}, "readers='node'"),
        ({"sampler": [0], "ends": "pad"}, "a DataLoader with a sampler has no argument 'ends'"),
        ({"batch_sampler": [[0]], "shuffle_buffer": 2}, "a DataLoader with a sampler has no argument 'shuffle_buffer'"),
        ({"batch_size": 11, "drop_last": True}, "all 10 samples .* set drop_last=False, or a smaller batch_size"),
        ({"drop_last": True, "ends": "pad"}, "ends='pad' contradicts drop_last=True; remove one"),
        ({"generator": torch.Generator(), "seed": 1}, "generator and seed are two names of one argument"),
        ({"prefetch_factor": 2, "prefetch": 3}, "prefetch_factor and prefetch are two names of one argument"),
        (
            {"multiprocessing_context": "spawn", "start_method": "fork"},
            "multiprocessing_context and start_method are two names of one argument",
        ),
        *(({name: True}, name) for name in ("weights", "lanes", "block")),
        ({"weights": [1.0] * 10, "num_samples": True}, "num_samples"),
        *(
            (
                {"dataset": source, "batchsize": 4, **more},
                r"DataLoader has no argument 'batchsize'\. Did you mean 'batch_size'",
            )
            for source in ([{"n": 1}], stream)
            for more in ({}, {"sampler": [0]})
        ),
        *(({name: np.zeros(2)}, f"{name} is array") for name in ("pin_memory", "in_order", "ends", "timeout")),
        ({"generator": np.random.default_rng(0)}, "generator is Generator"),
        ({"generator": torch.Generator}, "generator is <class"),
        ({"multiprocessing_context": 3}, "multiprocessing_context is 3"),
        ({"multiprocessing_context": "forks"}, "multiprocessing_context is 'forks'"),
        ({"batch_size": torch.tensor(2)}, r"batch_size is tensor\(2\); it must be an int"),
        ({"batch_size": np.array(2)}, r"batch_size is array\(2\); it must be an int"),
    ],
)
def test_arguments_that_exclude_each_other_or_make_no_sense_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataLoader(**{"dataset": Pictures(), **arguments})


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        slowly(
            Pictures(), {"batch_size": 2, "seed": 3, "num_workers": 1, "start_method": "spawn", "prefetch_factor": 2}
        ),
        (Pictures(), {"global_batch_size": 2, "weights": np.ones(10), "num_samples": 8, "check_every": 3}),
        (lambda: iter(Pictures()), {"batch_size": 2, "shuffle_buffer": 4, "seed": 3}),
        (Pictures(), {"batch_size": 2, "readers": "node", "timeout": 60.0}),
    ],
    ids=["workers", "weights", "stream", "node"],
)
def test_numbers_of_numpy_are_taken_like_those_of_python(source: Any, arguments: dict[str, Any]) -> None:
    def batches(arguments: dict[str, Any]) -> Any:
        loader = DataLoader(source, **arguments)
        first = plain(dict(next(iter(loader))))
        state = json.dumps(loader.state_dict())
        return first, state

    as_numpy = {
        name: np.array(value)[()] if type(value) in (int, float) else value for name, value in arguments.items()
    }
    assert batches(as_numpy) == batches(arguments)


def test_an_annotation_may_name_the_type_of_the_batches() -> None:
    loader_class: Any = DataLoader
    assert get_origin(loader_class[int]) is DataLoader


def test_a_distributed_sampler_is_refused_or_within_a_batch_sampler_must_be_for_this_rank() -> None:
    sampler = torch.utils.data.DistributedSampler(Pictures(), num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match=r"Remove it and set shuffle=True"):
        DataLoader(Pictures(), 2, sampler=sampler)
    ordered = torch.utils.data.DistributedSampler(Pictures(), num_replicas=2, rank=0, shuffle=False)
    with pytest.raises(ConfigError, match=r"Remove it and set shuffle=False"):
        DataLoader(Pictures(), 2, sampler=ordered)

    def loader_for(replicas: int, rank: int) -> Any:
        sampler = torch.utils.data.DistributedSampler(Pictures(), replicas, rank, shuffle=False)
        return DataLoader(Pictures(), batch_sampler=torch.utils.data.BatchSampler(sampler, 4, False))

    assert len(loader_for(1, 0)) == len([*loader_for(1, 0)]) == 3
    with pytest.raises(ConfigError, match=r"DistributedSampler for rank 1 of 2, but this is data-parallel rank 0 of 1"):
        loader_for(2, 1)


def test_loaders_of_all_kinds_are_instances_and_samplers_of_this_package_are_taken() -> None:
    dataset = [{"x": number} for number in range(8)]
    sampler = CyclicSampler(dataset, 4)
    for loader in (DataLoader(dataset, sampler), DataLoader(dataset, sampler=sampler), DataLoader(Numbers(), 2)):
        assert isinstance(loader, DataLoader)
        assert batch_info(next(iter(loader))) is not None
    with pytest.raises(TypeError, match="wrap a loader"):
        type("Mine", (DataLoader,), {})


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"batch_size": 4, "drop_last": True, "collate_fn": collate, "timeout": 0, "persistent_workers": False},
        {"batch_size": 3, "sampler": torch.utils.data.SequentialSampler(Pictures())},
        {"batch_sampler": [[3, 1], [0, 0, 5]]},
        {"batch_size": 2, "num_workers": 2, "prefetch_factor": 3, "worker_init_fn": print},
        {"batch_size": 2, "num_workers": 64, "prefetch_factor": 8},
    ],
)
def test_a_loader_has_the_attributes_of_pytorchs(arguments: dict[str, Any]) -> None:
    dataset = Pictures()
    loader, like = DataLoader(dataset, **arguments), torch.utils.data.DataLoader(dataset, **arguments)
    names = ["dataset", "batch_size", "num_workers", "drop_last", "pin_memory", "pin_memory_device", "worker_init_fn"]
    names += ["generator", "multiprocessing_context", "persistent_workers"]
    names += [
        name for name in ("collate_fn", "timeout", "prefetch_factor", "sampler", "batch_sampler") if name in arguments
    ]
    assert {name: getattr(loader, name) for name in names} == {name: getattr(like, name) for name in names}
    assert loader.collate_fn and len(loader) == len(like)


@pytest.mark.parametrize("name", ["dataset", "sampler", "drop_last", "collate_fn", "num_workers"])
@pytest.mark.parametrize("source", [Pictures, Numbers])
def test_an_argument_of_a_loader_cannot_be_replaced_afterwards(source: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"the {name} of a loader cannot be changed; make another loader"):
        setattr(DataLoader(source(), 2), name, [Pictures()])


def test_a_loader_of_an_iterable_has_the_attributes_of_pytorchs() -> None:
    numbers = Numbers()
    loader = DataLoader(numbers, 2)
    assert (loader.dataset, loader.batch_size, loader.num_workers, loader.drop_last) == (numbers, 2, 0, False)
    assert (loader.sampler, loader.batch_sampler) == (None, None)
    # Its length, where it has one, may count batches.
    assert indexed_dataset_of(loader) is None and indexed_dataset_of(DataLoader([1], fields=["x"])) == [1]


class Sized(Numbers):
    def __init__(self, said: int = 10) -> None:
        self.said = said

    def __len__(self) -> int:
        return self.said


@pytest.mark.parametrize("readers", ["every_rank", "node"])
@pytest.mark.parametrize("arguments", [{"batch_size": 4}, {"batch_size": 5}, {"batch_size": 4, "drop_last": True}])
def test_the_length_of_a_loader_of_an_iterable_that_has_one_is_that_of_pytorch(
    readers: str, arguments: dict[str, Any]
) -> None:
    loader = DataLoader(Sized(), readers=readers, **arguments)
    assert len(loader) == len(torch.utils.data.DataLoader(Sized(), **arguments)) == len(list(loader))
    assert len(loader.numpy()) == len(loader)


@pytest.mark.parametrize("readers", ["every_rank", "node"])
@pytest.mark.parametrize(
    "make",
    [
        lambda **more: DataLoader([[1, 2], [3, 4], [5, 6]], batch_size=None, shuffle=True, fields=["x"], **more),
        lambda **more: from_iterable(torch.utils.data.DataLoader(Pictures(), 4), **more),
        lambda **more: DataLoader(MappedStream(Sized(), dict), 4, **more),
        # A short last batch that is dropped does not count.
        *(
            partial(from_iterable, torch.utils.data.DataLoader(Pictures(), rows), ends="drop")
            for rows in (4, 5, 10, 20)
        ),
    ],
)
def test_the_length_of_a_loader_is_that_of_its_source(make: Any, readers: str) -> None:
    loader = make(readers=readers)
    assert len(loader) == len(list(loader)) > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(), 4),
        lambda: DataLoader(lambda: stream(), 4),
        lambda: DataLoader(Numbers(), 4, readers="node"),
        lambda: DataLoader(FilteredStream(Sized(), bool), 4),
        lambda: from_iterable(torch.utils.data.DataLoader(Pictures(), 4), 2),
    ],
)
def test_a_loader_of_an_unknown_length_says_so(make: Any) -> None:
    loader = make()
    with pytest.raises(TypeError, match=r"number of batches.*unknown|number of batches.*FilteredStream is not known"):
        len(loader)
    assert loader and len(list(loader)) > 0


def test_a_length_that_is_too_small_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Sized(5), 4)
    assert len(loader) == 2
    for _ in range(2):
        assert len([*iter(loader)]) == 3
    assert caplog.text.count("Sized yields more batches than len(loader), which is 2") == 2
