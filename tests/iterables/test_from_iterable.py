"""What loaders over iterables promise: exact batches, ends, resume at every cut point, and clear errors."""

from __future__ import annotations

import csv
import gc
import importlib
import io
import json
import os
import random
import sys
import threading
import time
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable
from unittest.mock import MagicMock

import numpy as np
import oneflow as flow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from libai_data import DataLoader
from libai_data.data.datasets import FilteredDataset, Map
from libai_data.data.items import array_in, leaves_of
from libai_data.data.random.global_generators import seeded, warn_once
from libai_data.data.random.sample_random import BatchRandom
from libai_data.data.transforms import BatchTransform, Mixup
from libai_data.delivery import to_global
from libai_data.delivery.read_plan import READERS
from libai_data.engine.batches import join_inputs
from libai_data.engine.evaluation import DatasetEvaluator
from libai_data.engine.evaluation.inference import inference_on_dataset
from libai_data.errors import CheckpointError, ConfigError, PassError, SampleError, SchemaError
from libai_data.iterables import FilteredStream, default_collate, from_iterable, shared_use
from libai_data.iterables.prefetcher import Flag, Prefetcher
from libai_data.loader import PadCollator
from libai_data.mesh.current import set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.structures import DistTensorData, Instance, batch_info
from tests.deadline import stretched, wait_until
from tests.iterables.rows import Joined, Listed, flat, numbers, resumed, rows_of, sample, taken
from tests.loader.sample_datasets import Speechless
from tests.loader.streams import loader_threads
from tests.properties import examples, slowly

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Record:
    x: Any
    y: int


class LiBaisInstance:
    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def get_fields(self) -> dict[str, Any]:
        return {name: LiBaisTensor(value) for name, value in self._fields.items()}


class LiBaisTensor:
    def __init__(self, value: Any) -> None:
        self.tensor = flow.tensor(value)
        self.sbp_list = ["split_0", "broadcast"]
        self.placement_idx = 0


def batches_of(sizes: list[int]) -> list[dict[str, Any]]:
    """Batches of these sizes, whose rows are counted on."""
    edges = np.cumsum([0, *sizes])
    return [
        default_collate([sample(number) for number in range(start, stop)])
        for start, stop in zip(edges[:-1], edges[1:])
        if stop > start
    ]


FORMS: dict[str, Callable[[int], Any]] = {
    "dict": sample,
    "ordered dict": lambda number: OrderedDict(sample(number)),
    "named tuple": lambda number: Point(**sample(number)),
    "tuple": lambda number: tuple(sample(number).values()),
    "list": lambda number: list(sample(number).values()),
    "dataclass": lambda number: Record(**sample(number)),
    "Instance": lambda number: Instance(**{name: DistTensorData(value) for name, value in sample(number).items()}),
    "OneFlow tensors": lambda number: {"x": flow.full((2, 3), float(number)), "y": flow.tensor(number)},
    "lists of numbers": lambda number: {"x": [[float(number)] * 3] * 2, "y": number},
    "LiBai's Instance": lambda number: LiBaisInstance(sample(number)),
    "notes of a tool": lambda number: {"__key__": "a", **sample(number)},
}


@pytest.mark.parametrize("is_map_style", [False, True], ids=["stream", "map-style"])
@pytest.mark.parametrize("form", FORMS)
def test_samples_of_each_form_become_the_same_batches(form: str, is_map_style: bool) -> None:
    samples = [FORMS[form](number) for number in range(6)]
    fields = ["x", "y"] if form in ("tuple", "list") else None
    loader = from_iterable(samples if is_map_style else lambda: samples, 3, fields=fields)
    batches = list(loader)
    found = [(rows_of(batch), batch.x.tensor.dtype, list(batch.get_fields())) for batch in batches]
    unpacked = batches[0].values() if form in ("tuple", "list", "named tuple") else ["x", "y"]
    assert all(one is other for one, other in zip(batches[0], unpacked))
    assert form == "LiBai's Instance" or type(default_collate(samples)) is type(samples[0])
    assert found == [([0, 1, 2], flow.float32, ["x", "y"]), ([3, 4, 5], flow.float32, ["x", "y"])]


@pytest.mark.parametrize("is_map_style", [False, True], ids=["stream", "map-style"])
def test_batches_are_nested_as_their_samples_are(is_map_style: bool) -> None:
    def nested(number: int) -> dict[str, Any]:
        return {
            "inputs": Point({"ids": np.arange(number, number + 3)}, (np.float32(number), [np.ones(2), np.zeros(1)])),
            "name": f"sämple {number}" + "!" * number,
            "raw": bytes([number, 0]),
            "label": number,
        }

    samples = [nested(number) for number in range(4)]
    loader = from_iterable(
        samples if is_map_style else lambda: iter(samples), 2, layouts={"label": {"placement_idx": -1}}
    )
    first, second = list(loader)
    assert isinstance(second.inputs, Point)
    assert second.inputs.x["ids"].tensor.numpy().tolist() == [[2, 3, 4], [3, 4, 5]]
    assert isinstance(second.inputs.y, tuple)
    assert isinstance(second.inputs.y[1], list)
    assert second.inputs.y[1][1].shape == (2, 1)
    assert second.name == ["sämple 2!!", "sämple 3!!!"]
    assert second.raw == [b"\2\0", b"\3\0"]
    assert second.label.placement_idx == -1
    arguments = to_global(second)
    assert arguments["inputs"].x["ids"].is_global
    assert arguments["inputs"].y[0].numpy().tolist() == [2.0, 3.0]
    assert arguments["name"] == second.name
    assert batch_info(first).valid == 2  # type: ignore[union-attr]


@dataclass(frozen=True)
class Scaled:
    """Computes fields when it is made."""

    x: float
    name: str
    half: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", self.x * 10)
        object.__setattr__(self, "half", self.x / 2)


class ScaledPair(namedtuple("ScaledPair", ["x", "name", "half"])):
    def __new__(cls, x: float, name: str) -> ScaledPair:
        return super().__new__(cls, x * 10, name, x * 5)


@pytest.mark.parametrize("kind", [Scaled, ScaledPair])
@pytest.mark.parametrize("is_map_style", [True, False])
@pytest.mark.parametrize("is_nested", [True, False])
def test_what_the_constructor_of_a_sample_computes_is_not_computed_again_for_a_batch(
    kind: Any, is_map_style: bool, is_nested: bool
) -> None:
    samples = [kind(float(number), f"name {number}") for number in range(4)]
    items = [{"pair": sample} for sample in samples] if is_nested else samples
    loader = from_iterable(items if is_map_style else lambda: iter(items), 4)
    [batch] = [read["pair"] if is_nested else read for read in loader.numpy()]
    fields = batch._asdict() if isinstance(batch, ScaledPair) else dict(batch)
    assert {name: list(values) for name, values in fields.items()} == {
        "x": [0, 10, 20, 30],
        "name": [f"name {number}" for number in range(4)],
        "half": [0, 5, 10, 15],
    }


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"x": np.ones(2)}, {"x": np.ones(3)}], r"field 'x': .*sample 0 .*\[2\], sample 1 .*\[3\]"),
        ([{"x": 1}, {"y": 1}], r"sample 0 of a batch has \['x'\], sample 1 has \['y'\]"),
        ([{"x": {"a": 1}}, {"x": 1}], "field 'x': sample 0 of a batch is a dict, sample 1 is a number"),
        ([{"x": {"a": None}}] * 2, "field 'x.a' is None"),
        ([{"x": ([1], 2)}, {"x": ([1],)}], r"field 'x': sequences of unequal lengths: \[2, 1\]; .* collate_fn"),
        ([{"x": object()}] * 2, "field 'x'"),
    ],
)
def test_samples_that_do_not_fit_together_are_named(samples: list[Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        default_collate(samples)


@pytest.mark.parametrize("source", ["stream", "texts by index"])
def test_samples_that_differ_end_the_run_with_all_schemas_their_counts_and_a_remedy(source: str) -> None:
    rows = [{"x": np.ones((2, 1 + (number % 3 == 1)), np.float32), "name": "n"} for number in range(8)]
    error = (
        r"Samples of this batch: 5 of {name: text, x: float32 \[2, 1\]}, "
        r"3 of {name: text, x: float32 \[2, 2\]}. Make all samples alike"
    )
    with pytest.raises(SampleError, match=error):
        next(iter(from_iterable(iter(rows) if source == "stream" else rows, 8)))


class OnlyDlpack:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_tensors_of_batches_are_not_copied() -> None:
    torch = pytest.importorskip("torch")
    kept = [{"x": torch.arange(8.0).reshape(4, 2), "y": np.arange(4), "z": OnlyDlpack(np.arange(4))}]
    (batch,) = from_iterable(kept, batches=True)
    kept[0]["x"][1, 1] = 50
    kept[0]["y"][2] = 60
    kept[0]["z"].array[1] = 70
    assert batch.x.tensor.numpy()[1, 1] == 50
    assert batch.y.tensor.numpy()[2] == 60
    assert batch.z.tensor.numpy().tolist() == [0, 70, 2, 3]


@settings(max_examples=examples(25))
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 0),
    micro=st.integers(1, 6),
    ends=st.sampled_from(["drop", "pad", "cycle"]),
)
def test_batches_are_cut_anew_without_losing_a_row(sizes: list[int], micro: int, ends: str) -> None:
    rows = sum(sizes)
    loader = from_iterable(lambda: iter(batches_of(sizes)), micro, batches=True, ends=ends)
    found = taken(loader, 2 * rows // micro + 1 if ends == "cycle" else None)
    if ends == "cycle":
        assert flat(found) == [number % rows for number in range(len(found) * micro)]
    else:
        assert flat(found) == list(range(rows if ends == "pad" else rows // micro * micro))
        assert [info.valid for info, _ in found] == [min(micro, rows - info.position) for info, _ in found]


@settings(max_examples=examples(15))
@given(cut=st.integers(0, 12), micro=st.integers(1, 7), other=st.integers(1, 7), batches=st.booleans())
def test_a_stream_goes_on_after_every_cut_in_batches_of_any_size(
    cut: int, micro: int, other: int, batches: bool
) -> None:
    def source(epoch: int) -> Iterator[Any]:
        rows = list(numbers(epoch))
        return iter([default_collate(rows[start : start + 5]) for start in range(0, 22, 5)] if batches else rows)

    whole = from_iterable(source, micro, batches=batches, ends="cycle")
    rows = flat(taken(whole, cut + 10))
    stopped = from_iterable(source, micro, batches=batches, ends="cycle")
    taken(stopped, cut)
    state = stopped.state_dict()
    assert len(str(state)) < 1024
    again = from_iterable(source, other, batches=batches, ends="cycle")
    again.load_state_dict(state)
    found = flat(taken(again, 3))
    expected = rows[cut * micro :]
    assert found[: len(expected)] == expected[: len(found)]


def test_a_batch_of_the_iterable_is_a_global_batch_unless_a_size_is_given() -> None:
    loader = from_iterable(lambda: iter(batches_of([6, 6, 5])), batches=True, ends="pad")
    assert loader.global_batch_size is None
    found = taken(loader)
    assert [len(rows) for _, rows in found] == [6, 6, 6]
    assert found[-1][0].valid == 5
    assert loader.global_batch_size == 6


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_state_of_a_rank_that_does_not_read_resumes_in_any_epoch(epochs: int) -> None:
    stopped = from_iterable(lambda: map(sample, range(22)), 4)
    for _ in range(epochs):
        taken(stopped)
    taken(stopped, 3)
    state = {name: value for name, value in stopped.state_dict().items() if name != "iterable"}
    resumed = from_iterable(lambda: map(sample, range(22)), 4)
    resumed.load_state_dict(state)
    [(info, rows), *_] = taken(resumed, 1)
    assert (info.epoch, rows) == (epochs, [12, 13, 14, 15])


@pytest.mark.parametrize(("ends", "batches", "following"), [("drop", 3, 12), ("cycle", 7, 6)])
def test_a_state_of_a_stream_is_compared_by_a_function_of_one_shard(ends: str, batches: int, following: int) -> None:
    def rows(shard: int, num_shards: int) -> Iterator[Any]:
        return (sample(number) for number in range(shard, 22, num_shards))

    stopped = from_iterable(lambda: rows(0, 1), 4, ends=ends)
    taken(stopped, batches)
    state = stopped.state_dict()
    resumed = from_iterable(rows, 4, ends=ends)
    resumed.load_state_dict(state)
    assert taken(resumed, 1)[0][1] == [*range(following, following + 4)]
    others = from_iterable(lambda shard, num_shards: rows(shard + 1, num_shards), 4, ends=ends)
    others.load_state_dict(state)
    with pytest.raises(CheckpointError, match="does not replay"):
        taken(others)


@pytest.mark.parametrize("batches", [False, True], ids=["samples", "batches"])
@pytest.mark.parametrize("change", ["leaves a row out", "changes a value"])
def test_a_stream_that_replays_otherwise_after_many_rows_is_refused(change: str, batches: bool) -> None:
    changed = False

    def rows() -> Iterator[Any]:
        for number in range(300):
            if changed and number == 200 and change == "leaves a row out":
                continue
            x = np.full(3000, number, np.float32)
            x[-1] += changed and number == 200
            yield {"x": x, "y": number}

    def source() -> Iterator[Any]:
        return (default_collate([row]) for row in rows()) if batches else rows()

    stopped = from_iterable(source, 4, batches=batches)
    state = [stopped.state_dict() for _ in zip(range(60), stopped)][-1]
    same, other = (from_iterable(source, 4, batches=batches) for _ in range(2))
    same.load_state_dict(state)
    assert next(iter(same)).y.tensor.numpy().tolist() == [240, 241, 242, 243]
    changed = True
    other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="does not replay: the first 240 rows of epoch 0"):
        next(iter(other))
    other.load_state_dict(state, override=["seed"])
    next(iter(other))


def test_the_state_of_another_kind_or_of_a_stream_that_has_become_shorter_is_refused() -> None:
    stopped = from_iterable(numbers, 4)
    taken(stopped, 4)
    again = from_iterable(lambda: (sample(number) for number in range(10)), 4)
    again.load_state_dict(stopped.state_dict())
    with pytest.raises(CheckpointError, match="ended 6 rows before the row of the checkpoint"):
        taken(again)
    loader = from_iterable(numbers, 4)
    with pytest.raises(CheckpointError, match="not saved by a loader over an iterable"):
        loader.load_state_dict({"position": 4, "seed": 1})
    endless = from_iterable(numbers, 4, ends="cycle")
    with pytest.raises(CheckpointError, match="ends=cycle, which is now short"):
        loader.load_state_dict(endless.state_dict())


@pytest.mark.parametrize(
    ("error", "told"),
    [(OSError("the disk is gone"), "OSError after 9 item.*the disk is gone"), (Speechless(), "Speechless after 9")],
)
def test_an_iterable_that_raises_midway_is_named_where_it_does(error: Exception, told: str) -> None:
    def breaks() -> Iterator[Any]:
        yield from (sample(number) for number in range(9))
        raise error

    loader = from_iterable(breaks, 4)
    batches = iter(loader)
    assert [rows_of(next(batches)) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for _ in range(2):
        with pytest.raises(SampleError, match=f"breaks raised {told}") as raised:
            next(batches)
        assert raised.value.__cause__ is error


def test_an_iterable_that_never_yields_is_named_after_the_timeout() -> None:
    end = threading.Event()

    def hangs() -> Iterator[Any]:
        yield from (sample(number) for number in range(5))
        end.wait()

    timeout = stretched(0.5)
    loader = from_iterable(hangs, 4, timeout=timeout)
    batches = iter(loader)
    next(batches)
    with pytest.raises(SampleError, match=f"hangs has yielded nothing for {timeout:g} s, after 5 item"):
        next(batches)
    end.set()


def test_an_iterable_without_a_row_has_no_batch_and_cannot_cycle() -> None:
    assert list(from_iterable(lambda: iter(()), 4)) == []
    assert list(from_iterable([], batches=True)) == []
    assert from_iterable(lambda: iter(()), 4).numpy(), "a loader is true, even if it has no length or no batch"
    with pytest.raises(ConfigError, match="yields no samples"):
        next(iter(from_iterable(lambda: iter(()), 4, ends="cycle")))


class HoldsAnIterator:
    def __init__(self, is_wrapped: bool) -> None:
        self._iterator = numbers()
        self._is_wrapped = is_wrapped

    def __iter__(self) -> Iterator[Any]:
        return map(dict, self._iterator) if self._is_wrapped else self._iterator


@pytest.mark.parametrize("ends", ["drop", "cycle"])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_what_holds_an_iterator_has_no_empty_second_round(is_wrapped: bool, ends: str) -> None:
    holder = HoldsAnIterator(is_wrapped)
    for source in (holder, lambda: iter(HoldsAnIterator.__iter__(holder))):
        holder._iterator = numbers()
        loader = from_iterable(source, 4, ends=ends)
        assert len(taken(loader, 5)) == 5
        with pytest.raises((ConfigError, SampleError), match="can be iterated only once"):
            taken(loader, 6 if ends == "cycle" else None)
        loader.close()


def test_an_iterator_that_an_earlier_loader_began_to_read_is_refused() -> None:
    rows = numbers()
    first = from_iterable(rows, 2)
    next(iter(first))
    first.close()
    del first
    gc.collect()
    with pytest.raises((ConfigError, SampleError), match="can be iterated only once"):
        next(iter(from_iterable(rows, 2)))


class EveryOtherEpoch:
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if self.epoch % 2 else map(sample, range(3))


def every_other_epoch(epoch: int) -> Iterator[Any]:
    source = EveryOtherEpoch()
    source.set_epoch(epoch)
    return iter(source)


@pytest.mark.parametrize("source", [EveryOtherEpoch(), every_other_epoch, FilteredStream(every_other_epoch, bool)])
def test_an_epoch_may_have_no_rows_if_the_source_knows_it(source: Any, caplog: pytest.LogCaptureFixture) -> None:
    loader = from_iterable(source, 2)
    assert [len(list(loader)) for _ in range(4)] == [2, 0, 2, 0]
    assert caplog.text.count("yields no batch") == 2
    again = from_iterable(source, 2)
    again.load_state_dict(loader.state_dict())
    assert [len(list(again)) for _ in range(3)] == [2, 0, 2]
    with pytest.raises(ConfigError, match="yields no samples in epoch 1, so it cannot cycle"):
        taken(from_iterable(source, 2, ends="cycle"), 2)


class KnowsItsEpoch:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"x": 100 * self.epoch + number} for number in range(24))


class Measured(Listed):
    def __len__(self) -> int:
        return len(self.listed)


class AheadOfItself(Listed):
    """Counts two samples too many in its state, as an iterable that reads ahead may do."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "place": self.place + 2}


class ByState:
    def __init__(self, listed: Any, kind: Callable[[Any], Any] | None = None) -> None:
        self.listed, self.kind = listed, kind or Entered

    def __iter__(self) -> Any:
        return self.kind(self.listed)


class Entered(Listed):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(super().__iter__())


class EnteredAhead(Entered, AheadOfItself):
    pass


@pytest.mark.parametrize("kind", [AheadOfItself, lambda listed: ByState(listed, EnteredAhead)])
def test_a_wrong_state_after_the_first_batch_of_an_epoch_loses_no_rows(kind: Any) -> None:
    stopped, again = (from_iterable(kind(range(20)), 4) for _ in range(2))
    taken(stopped, 1)
    again.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert flat(taken(again)) == [*range(4, 20)]
    taken(stopped, 2)
    again.load_state_dict(stopped.state_dict())
    with pytest.raises(CheckpointError, match="load_state_dict does not restore what state_dict saved"):
        taken(again)


@pytest.mark.parametrize("options", [{}, {"shuffle_buffer": 4, "seed": 1}], ids=["in order", "shuffled"])
@pytest.mark.parametrize("kind", [Listed, ByState])
@pytest.mark.parametrize(
    "now",
    [range(-1, 40), np.random.default_rng(0).permutation(41).tolist(), range(1, 40)],
    ids=["grew at the front", "grew and is in another order", "lost a row"],
)
def test_an_own_state_does_not_fit_data_whose_last_rows_are_others(
    now: Any, kind: Any, options: dict[str, Any]
) -> None:
    stopped, whole = (from_iterable(kind(range(40)), 4, **options) for _ in range(2))
    taken(stopped, 3)
    state = json.loads(json.dumps(stopped.state_dict()))
    same, other = from_iterable(kind(range(40)), 4, **options), from_iterable(kind(now), 4, **options)
    same.load_state_dict(state)
    assert flat(taken(same)) == flat(taken(whole))[12:]
    other.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"does not continue where its state was saved.*resume_override=\[seed\]"):
        taken(other)
    other.load_state_dict(state, override=["seed"])
    assert len(flat(taken(other))) == len(now) - 12


def test_rows_that_were_appended_belong_to_the_rest_of_the_epoch_of_an_own_state() -> None:
    stopped, longer = from_iterable(Listed(range(40)), 4), from_iterable(Listed(range(50)), 4)
    taken(stopped, 3)
    longer.load_state_dict(stopped.state_dict())
    assert flat(taken(longer)) == [*range(12, 50)]


def test_an_own_state_does_not_fit_an_iterable_of_another_length() -> None:
    stopped, longer = from_iterable(Measured(range(40)), 4), from_iterable(Measured(range(50)), 4)
    taken(stopped, 1)  # No row before the state is read again.
    state = json.loads(json.dumps(stopped.state_dict()))
    with pytest.raises(CheckpointError, match=r"a length of 40 .* now has 50.*resume_override=\[dataset\]"):
        longer.load_state_dict(state)
    longer.load_state_dict(state, override=["dataset"])
    assert flat(taken(longer)) == [*range(4, 50)]


@settings(max_examples=examples(15))
@given(
    cuts=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    rows=st.one_of(st.none(), st.integers(1, 9)),
    changed=st.sampled_from(["nothing", "no digest in the first state", "override"]),
)
def test_a_chain_of_own_states_continues_whatever_the_first_one_has(
    cuts: list[int], rows: int | None, changed: str
) -> None:
    def loader() -> Any:
        if rows is None:
            return from_iterable(Listed(range(80)), 3, prefetch=1)
        return from_iterable(Joined(Listed(range(80)), rows), 3, batches=True, prefetch=1)

    expected, state = 0, None
    for number, cut in enumerate(cuts):
        each = loader()
        if state is not None:
            is_first = number == 1
            if is_first and changed.startswith("no digest"):
                state["iterable"].get("source", {}).pop("rows_digest", None)
            each.load_state_dict(state, override=["seed"] if is_first and changed == "override" else [])
        assert flat(taken(each, cut)) == [*range(expected, expected + 3 * cut)]
        expected += 3 * cut
        state = json.loads(json.dumps(each.state_dict()))


_LINES = io.StringIO("".join(f"{number}\n" for number in range(24)))


def of_a_global_file() -> Iterator[Any]:
    _LINES.seek(0)
    for line in _LINES:
        yield sample(int(line))


def of_an_outer_file(lines: Any = _LINES) -> Iterator[Any]:
    lines.seek(0)
    return map(sample, map(int, lines))


class HasFile:
    def __init__(self, lines: Any = _LINES) -> None:
        self.lines = lines

    def __iter__(self) -> Iterator[Any]:
        self.lines.seek(0)
        return (sample(int(*row)) for row in csv.reader(self.lines))


class NamesFile(HasFile):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.lines.seek(0)


OF_ONE_FILE: list[Callable[[], Any]] = [lambda: of_a_global_file, lambda: of_an_outer_file, HasFile, NamesFile]


@pytest.mark.parametrize(
    "source", [KnowsItsEpoch, partial(Listed, range(24)), partial(map, sample, range(24)), *OF_ONE_FILE]
)
def test_what_one_loader_reads_at_a_time_is_not_read_by_two(source: Any) -> None:
    shared = source()
    loaders = [from_iterable(shared, 2, prefetch=1) for _ in range(2)]
    first, second = loaders
    second_epoch = 0 if hasattr(shared, "__next__") else 3
    second.set_epoch(second_epoch)
    older = iter(first)
    next(older)
    with pytest.raises(SampleError, match=r"another loader has begun to read the same|can be iterated only once"):
        for _ in iter(second):
            list(older)


def test_two_loaders_may_write_to_one_file(tmp_path: Path) -> None:
    with (tmp_path / "log.txt").open("w") as log:

        def logged() -> Iterator[Any]:
            for number in range(6):
                print(number, file=log)
                yield sample(number)

        loaders = [from_iterable(logged, 2) for _ in range(2)]
        assert len(list(zip(*loaders))) == 3


@pytest.mark.parametrize(
    "source", [KnowsItsEpoch(), Listed(range(24)), [{"x": 1}] * 6, *(make() for make in OF_ONE_FILE)]
)
def test_what_one_loader_reads_at_a_time_is_read_by_two_in_turn(source: Any) -> None:
    next(iter(from_iterable(source, 2, prefetch=1)))
    loaders = [from_iterable(source, 2, prefetch=1) for _ in range(2)]
    next(iter(loaders[0]))
    for loader in reversed(loaders):
        assert len(list(loader)) == (3 if isinstance(source, list) else 12)
        loader.close()


def test_a_loader_that_reads_ahead_takes_no_row_of_a_file_that_another_loader_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = io.StringIO("".join(f"{number}\n" for number in range(24)))
    is_at_3, reads_on, has_read_on = (threading.Event() for _ in range(3))
    threads: list[threading.Thread] = []

    def slow(line: str) -> Any:
        if reads_on.is_set() and threading.current_thread() is threads[0]:
            has_read_on.set()
        elif int(line) == 3 and not is_at_3.is_set():
            is_at_3.set()
            reads_on.wait(stretched(10))
        return sample(int(line))

    def rows() -> Iterator[Any]:
        threads.append(threading.current_thread())
        lines.seek(0)
        if len(threads) == 2:
            reads_on.set()
            has_read_on.wait(0.3)  # in vain
        return map(slow, lines)

    def wait_for_the_other(seconds: float) -> None:
        reads_on.set()
        time.sleep(seconds)

    monkeypatch.setattr(shared_use, "time", SimpleNamespace(sleep=wait_for_the_other))
    loaders = [from_iterable(rows, 2, prefetch=1) for _ in range(2)]
    next(iter(loaders[0]))
    assert is_at_3.wait(stretched(10))
    assert len(list(loaders[1])) == 12
    assert not has_read_on.is_set()


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (numbers, {}, "micro_batch_size is missing"),
        (numbers, {"micro_batch_size": 0}, "micro_batch_size"),
        (numbers, {"micro_batch_size": 2, "ends": "padd"}, "Did you mean 'pad'"),
        (numbers, {"micro_batch_size": 2, "shuffle": True}, "shuffle=True is for sources that give samples by their"),
        (numbers, {"micro_batch_size": 2, "on_error": "skpi"}, "on_error is 'skpi'.*Did you mean 'skip'"),
        (numbers, {"micro_batch_size": 2, "fields": "x"}, "fields is 'x'"),
        (numbers, {"micro_batch_size": 2, "fields": ["x", "x"]}, "one or more names, each once"),
        (numbers, {"micro_batch_size": 2, "readers": "rank1"}, "Did you mean 'rank0'"),
        (5, {"micro_batch_size": 2}, "a loader cannot be made of 5"),
        (
            KnowsItsEpoch,
            {"micro_batch_size": 2},
            r"dataset is the class KnowsItsEpoch; pass an object of it, KnowsItsEpoch\(...\)",
        ),
        ("data.tar", {"micro_batch_size": 2}, "a str is not an iterable of samples"),
        ({"train": []}, {"micro_batch_size": 2}, "a dict is not an iterable of samples"),
        ([], {"micro_batch_size": 2}, "is empty"),
        *(
            (source, {name: 2}, rf"from_iterable has no argument '{name}'\. Did you mean '{meant}'")
            for source in (numbers, [sample(0)])
            for name, meant in (("collate", "collate_fn"), ("batch_size", "micro_batch_size"))
        ),
        (
            lambda shard, num_shards: [],
            {"micro_batch_size": 2, "ends": "pad"},
            "each of its shards may end at another row",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_iterable(source, **options)


@pytest.mark.parametrize(
    ("samples", "fields", "message"),
    [
        ([(1, 2)], ["x"], r"1 name\(s\) \['x'\] for 2 value"),
        ([{"xs": 1}], ["x"], "Did you mean 'xs'"),
        ([np.ones(2)], None, "ndarray, without a name"),
    ],
)
def test_samples_without_names_are_named(samples: list[Any], fields: list[str] | None, message: str) -> None:
    for source in (samples, lambda: samples):
        with pytest.raises((SchemaError, SampleError), match=message):
            next(iter(from_iterable(source, 1, fields=fields)))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.ones(2), "y": np.ones(3)}, r"differ in their number of rows: \{'x': 2, 'y': 3\}"),
        ({"x": np.ones(2), "y": 3}, "field 'y' of the batch is a single number"),
    ],
)
def test_batches_that_are_none_are_named(batch: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        next(iter(from_iterable([batch], batches=True)))


def test_rows_of_different_shapes_stay_in_their_batches() -> None:
    ragged = [{"x": np.full((4, length), length)} for length in (3, 5, 2)]
    assert [batch.x.shape for batch in from_iterable(ragged, batches=True)] == [(4, 3), (4, 5), (4, 2)]
    with pytest.raises(SampleError, match="field 'x': rows of batches of different shapes"):
        list(from_iterable(ragged, 6, batches=True))


def test_a_collator_gets_samples_as_they_come() -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        assert all(isinstance(each, tuple) for each in samples)
        return {"y": np.array([each[1] for each in samples]), "x": np.stack([each[0] for each in samples])}

    samples = [tuple(sample(number).values()) for number in range(6)]
    for source in (samples, lambda: samples):
        loader = from_iterable(source, 3, collate_fn=collate)
        assert [rows for _, rows in taken(loader)] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("package", ["torch", "oneflow"])
def test_a_padding_loader_with_a_short_last_batch_is_refused_as_soon_as_lengths_differ(package: str) -> None:
    data = pytest.importorskip(f"{package}.utils.data")
    samples = [(np.full(2 + number % 5, number), number) for number in range(22)]

    def pad(rows: list[Any]) -> dict[str, Any]:
        longest = max(len(row) for row, _ in rows)
        return {
            "x": np.stack([np.pad(row, (0, longest - len(row)), constant_values=-1) for row, _ in rows]),
            "y": np.array([label for _, label in rows]),
        }

    short = data.DataLoader(samples, batch_size=4, collate_fn=pad)
    with pytest.raises(SchemaError, match=r"pads its batches to different lengths.*only 2 rows.*drop_last=True"):
        for _ in zip(range(3), from_iterable(short, 4, ends="cycle")):
            pass
    for ends in ("drop", "pad"):
        assert len(list(from_iterable(short, 4, ends=ends))) == (5 if ends == "drop" else 6)
    whole = data.DataLoader(samples, batch_size=4, collate_fn=pad, drop_last=True)
    assert len([batch for batch, _ in zip(from_iterable(whole, 4, ends="cycle"), range(12))]) == 12
    ours = from_iterable(lambda: iter(samples), 4, ends="cycle", collate_fn=pad)
    assert [batch.y.tensor.numpy().tolist() for batch, _ in zip(ours, range(6))][-1] == [20, 21, 0, 1]
    with pytest.raises(ConfigError, match="collate_fn makes batches of samples, but DataLoader yields batches"):
        from_iterable(whole, 4, collate_fn=pad)


@pytest.mark.parametrize("options", [{}, {"num_shards": 1, "num_workers": 1, "worker_type": "thread"}])
@pytest.mark.parametrize("package", ["torch", "oneflow"])
def test_batches_of_a_loader_are_no_samples_where_a_function_returns_it_or_it_is_an_iterator(
    package: str, options: dict[str, Any]
) -> None:
    data = pytest.importorskip(f"{package}.utils.data")
    samples = [(np.full(2, number), number) for number in range(8)]

    def made(batch_size: Any = 4) -> Any:
        return data.DataLoader(samples, batch_size=batch_size, collate_fn=None if batch_size is None else stacked)

    def stacked(rows: list[Any]) -> dict[str, Any]:
        return {"x": np.stack([row for row, _ in rows]), "y": np.array([label for _, label in rows])}

    loader = from_iterable(made, 2, **options)
    with pytest.raises(SampleError, match=r"made returned a DataLoader, which yields batches.*set batches=True"):
        next(iter(loader))
    loaders = [from_iterable(made, 2, batches=True, **options)]
    if not options:
        loaders.append(from_iterable(iter(made()), 2))
    for loader in loaders:
        assert [rows for _, rows in taken(loader)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def of_one_rank(kind: str) -> Any:
    """A loader or dataset of the samples of rank 0 of 2."""
    data = pytest.importorskip("torch.utils.data")
    rows: Any = [sample(row) for row in range(8)]
    sampler = data.DistributedSampler(rows, 2, 0, shuffle=False)
    if kind == "batch_sampler":
        return data.DataLoader(rows, batch_sampler=data.BatchSampler(sampler, 4, False))
    if kind == "datasets":
        datasets = pytest.importorskip("datasets")
        stream = datasets.Dataset.from_list([{"x": [row]} for row in range(8)]).to_iterable_dataset(2)
        return importlib.import_module("datasets.distributed").split_dataset_by_node(stream, 0, 2)
    loader = data.DataLoader(rows, batch_size=4, sampler=sampler)
    return tqdm(loader, disable=True) if kind == "bar" else loader


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler", "bar", "datasets"])
def test_what_reads_the_part_of_a_rank_is_refused_because_the_other_parts_would_be_lost(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"reads one of 2 parts, that of a rank, .* Remove the DistributedSampler or"):
        from_iterable(of_one_rank(kind), 2)


@pytest.mark.parametrize("bars", [1, 2])
def test_batches_below_a_progress_bar_are_no_samples(bars: int) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    rows: Any = [sample(row) for row in range(8)]
    loader = torch_data.DataLoader(rows, batch_size=4)
    shown: Any = loader
    for _ in range(bars):
        shown = tqdm(shown, disable=True)
    expected = [rows_of(batch) for batch in from_iterable(loader, 2)]
    for _ in range(2):  # also in the second epoch
        assert [rows_of(batch) for batch in from_iterable(shown, 2)] == expected
    with pytest.raises(ConfigError, match="IterableLoader of libai_data is a loader already"):
        from_iterable(tqdm(from_iterable(loader, 2), disable=True), 2)


def test_loaders_of_ours_are_no_iterables_of_samples() -> None:
    own = from_iterable([sample(number) for number in range(8)], 4)
    with pytest.raises(ConfigError, match="a BatchLoader of libai_data is a loader already; use it as it is"):
        from_iterable(own, 4)
    with pytest.raises(ConfigError, match="is a loader already"):
        from_iterable(from_iterable(numbers, 4), 4)
    with pytest.raises(SchemaError, match="yields batches of a loader of libai_data"):
        next(iter(from_iterable(lambda: iter(own), 2)))


def test_reading_ahead_is_bounded_and_ends_with_the_loader() -> None:
    read = []

    def counted() -> Iterator[Any]:
        for number in range(10**6):
            read.append(number)
            yield sample(number)

    def its_threads() -> list[str]:
        return [thread.name for thread in loader_threads() if "counted" in thread.name]

    loader = from_iterable(counted, 4, prefetch=2)
    batches = iter(loader)
    for _ in range(20):
        next(batches)
    # Those taken, those that wait, those in the reader's hands.
    assert len(read) <= 4 * (20 + 2 + 1)
    assert len(its_threads()) == 1
    loader.close()
    assert not its_threads()
    loader = from_iterable(counted, 4)
    batches = iter(loader)
    next(batches)
    del loader, batches
    wait_until(lambda: not its_threads(), "end of the threads")


def test_nested_batches_are_joined_and_evaluated() -> None:
    samples = [{"in": {"ids": np.full(2, n), "pair": (n, [np.ones(1)])}, "name": f"n{n}"} for n in range(5)]
    joined = join_inputs([to_global(batch) for batch in list(from_iterable(samples, 2, ends="pad"))[:2]])
    assert joined["in"]["ids"].numpy()[:, 0].tolist() == [0, 1, 2, 3]
    assert joined["in"]["pair"][1][0].shape == (4, 1)
    assert joined["name"] == ["n0", "n1", "n2", "n3"]

    class Seen(DatasetEvaluator):
        def __init__(self) -> None:
            self.numbers: list[int] = []

        def process(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
            assert list(inputs) == ["in"]
            self.numbers += inputs["in"]["pair"][0].numpy().tolist()

        def evaluate(self) -> dict[str, Any]:
            return {"numbers": self.numbers}

    def model(name: list[str], **inputs: Any) -> dict[str, Any]:
        return {"twice": inputs["in"]["ids"] * 2}

    loader = from_iterable(samples, 2, ends="pad")
    found = inference_on_dataset(model, loader, 2, 9, lambda data: to_global(data), "cpu", Seen())
    assert found == {"numbers": [0, 1, 2, 3, 4]}


def test_counting_forward_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = MagicMock()
    monkeypatch.setattr("libai_data.iterables.rows.progress_bar", bar)
    resumed(lambda: numbers, 7, 1, micro_batch_size=4, ends="cycle")
    bar.assert_called_once()
    assert [bar.call_args.kwargs[name] for name in ("desc", "total")] == ["Fast-forwarding numbers, epoch 1", 6]
    assert sum(call.args[0] for call in bar.return_value.__enter__.return_value.update.call_args_list) == 6


def test_a_function_with_one_of_the_parameters_of_shards_is_refused_unless_it_is_bound() -> None:
    def of_shard(shard: int) -> Iterator[Any]:
        return map(sample, range(shard, 8, 2))

    for function, name, other in ((of_shard, "shard", "num_shards"), (lambda num_shards=1: (), "num_shards", "shard")):
        with pytest.raises(ConfigError, match=f"has the parameter {name} but not {other}; give it both"):
            from_iterable(function, 2)
    loader = from_iterable(partial(of_shard, shard=1), 2)
    assert flat(taken(loader)) == [1, 3, 5, 7]


@pytest.mark.parametrize("name", ["sampler", "batch_sampler", "dataset", "test_batch_size", "consumed_samples"])
@pytest.mark.parametrize("ends", ["short", "cycle"])
def test_what_decides_the_order_in_another_way_is_refused(name: str, ends: str) -> None:
    options: dict[str, Any] = {name: [[0]]}
    with pytest.raises(ConfigError, match=f"has no argument '{name}'.*use DataLoader"):
        from_iterable([sample(0), sample(1)], 1, ends=ends, **options)


REUSED = np.zeros(4)


def overwritten(number: int) -> np.ndarray:
    REUSED[:] = number
    return REUSED[number % 2 * 2 :][:2]


@pytest.mark.parametrize(
    "item",
    [
        lambda number: {"x": overwritten(number), "number": np.full(2, number)},
        lambda number: (overwritten(number), np.full(2, number)),
        lambda number: {"x": {"inner": [overwritten(number)]}, "number": np.full(2, number)},
    ],
)
@pytest.mark.parametrize("batches", [False, True])
def test_an_iterable_that_overwrites_its_items_is_refused(item: Any, batches: bool) -> None:
    options: dict[str, Any] = {"batches": True} if batches else {"micro_batch_size": 4}
    loader = from_iterable(lambda: map(item, range(1, 7)), fields=["x", "number"], **options)
    with pytest.raises(SampleError, match=r"field .* of the iterable overwrites that of an earlier one; return a copy"):
        list(loader)


def test_the_same_item_again_batches_without_rows_and_a_field_called_self_are_taken() -> None:
    kept = {"x": np.ones(4)}
    loader = from_iterable(lambda: iter([kept] * 20), 4)
    assert len(list(loader)) == 5
    sizes = [0, 2, 0, 0, 3, 1, 0]
    loader = from_iterable(lambda: ({"x": np.full((size, 1), size)} for size in sizes), 2, batches=True)
    assert [batch.get_fields()["x"].tensor.numpy().ravel().tolist() for batch in loader] == [[2, 2], [3, 3], [3, 1]]
    loader = from_iterable(lambda: iter([{"self": np.ones(3)}] * 8), 2)
    assert next(iter(loader)).get_fields()["self"].shape == (2, 3)


@pytest.mark.parametrize(
    ("sizes", "is_told"), [((3, 3, 1), False), ((3, 1, 3), True), ((2, 4), True), ((4, 2, 4), True)]
)
def test_a_source_whose_batches_are_cut_again_is_told(
    sizes: tuple[int, ...], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    batches = [{"x": np.full(rows, number)} for number, rows in enumerate(sizes)]
    loader = from_iterable(lambda: iter(batches), batches=True).numpy()
    assert np.concatenate([batch["x"] for batch in loader]).tolist() == np.repeat(range(len(sizes)), sizes).tolist()
    assert (f"into batches of {sizes[0]} rows" in caplog.text) == is_told


def test_a_stream_that_is_shuffled_by_its_own_generator_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    warn_once.cache_clear()
    data = [{"x": number} for number in range(10)]
    generator = torch.Generator().manual_seed(0)
    loader = from_iterable(torch.utils.data.DataLoader(data, 5, shuffle=True, generator=generator))
    assert sorted(np.concatenate([batch["x"] for batch in loader.numpy()])) == list(range(10))
    assert "keeps a random generator" not in caplog.text


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_torch_loader_with_a_batch_sampler_that_shuffles_resumes_in_each_epoch(drop_last: bool) -> None:
    data = pytest.importorskip("torch").utils.data

    def loader_of() -> Any:
        generator = importlib.import_module("torch").Generator().manual_seed(1)
        batches = data.BatchSampler(data.RandomSampler(range(12), generator=generator), 5, drop_last)
        return from_iterable(data.DataLoader([{"x": number} for number in range(12)], batch_sampler=batches)).numpy()

    def rows(loader: Any) -> list[list[int]]:
        return [batch["x"].tolist() for batch in loader]

    loader = loader_of()
    epochs = [rows(loader) for _ in range(4)]
    stopped = loader_of()
    for epoch in range(3):
        batches = iter(stopped)
        for used in range(1, len(epochs[epoch]) + 1):
            next(batches)
            again = loader_of()
            again.load_state_dict(stopped.state_dict())
            assert rows(again) == (epochs[epoch][used:] or epochs[epoch + 1])
        assert next(batches, None) is None


def popping(samples: list[Any]) -> dict[str, Any]:
    return {"x": np.array([each.pop("x") for each in samples]), "noise": np.random.random(len(samples))}


def test_a_collator_that_draws_over_a_stream_draws_the_same_in_each_run() -> None:
    def run() -> list[list[float]]:
        loader = from_iterable(lambda: ({"x": number} for number in range(40)), 4, collate_fn=popping, ends="cycle")
        batches = [*islice(loader.numpy(), 15)]
        assert np.concatenate([batch["x"] for batch in batches]).tolist() == [*range(40), *range(20)]
        return [batch["noise"].tolist() for batch in batches]

    first = run()
    assert len({*np.ravel(first)}) == 60 and run() == first


@pytest.mark.parametrize(
    "form",
    [
        lambda x: {"x": x},
        lambda x: (x, x.copy()),
        lambda x: Point(x, x.copy()),
        lambda x: {"x": {"y": [x]}},
        lambda x: Instance(x=DistTensorData(x)),
        lambda x: Instance(x=DistTensorData(flow.from_numpy(x))),
    ],
)
def test_a_collator_that_draws_and_changes_its_samples_changes_each_row_once(form: Callable[[Any], Any]) -> None:
    def noisy(samples: list[Any]) -> dict[str, Any]:
        for each in samples:
            values = leaves_of(each).values()
            for value in values:
                array_in(value)[:] += 1
        return {"x": np.array([array_in(value)[0] for value in values]), "n": np.random.random(len(values))}

    loader = from_iterable(lambda: (form(np.zeros(2)) for _ in range(3)), 1, ends="short", collate_fn=noisy).numpy()
    assert [{*batch["x"].tolist()} for batch in loader] == [{1.0}] * 3


def test_a_collator_over_a_stream_gets_tensors_that_were_computed_with_gradients() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(1, requires_grad=True)
    loader = from_iterable(
        lambda: ({"x": weight * number} for number in range(4)),
        2,
        collate_fn=lambda samples: {"x": torch.stack([each["x"] for each in samples]).detach()},
    )
    assert [batch["x"].tolist() for batch in loader.numpy()] == [[[0], [1]], [[2], [3]]]


def test_tuples_of_a_stream_are_padded_by_the_names_that_fields_gives() -> None:
    samples = [(np.arange(1 + number), number) for number in range(4)]
    padded = PadCollator({"x": {"value": -1}})
    for source in (samples, lambda: iter(samples)):
        [(x, y)] = from_iterable(source, 4, fields=["x", "y"], collate_fn=padded).numpy()
        assert x.shape == (4, 4) and x[1].tolist() == [0, 1, -1, -1] and y.tolist() == [0, 1, 2, 3]


def test_a_collator_may_remove_fields_of_samples_that_a_list_keeps() -> None:
    loader = from_iterable([{"x": number} for number in range(4)], 2, collate_fn=popping).numpy()
    assert [batch["x"].tolist() for _ in range(2) for batch in loader] == [[0, 1], [2, 3]] * 2


def test_a_collator_that_changes_its_samples_changes_a_last_row_once_that_is_repeated() -> None:
    def adds_one(samples: list[Any]) -> dict[str, Any]:
        for each in samples:
            each["x"] += 1
        return default_collate(samples)

    loader = from_iterable(lambda: ({"x": np.zeros(1)} for _ in range(5)), 4, ends="pad", collate_fn=adds_one).numpy()
    assert [batch["x"].tolist() for batch in loader] == [[[1]] * 4] * 2


class AddsOne(BatchTransform):
    def __call__(self, fields: dict[str, np.ndarray], random: BatchRandom) -> None:
        fields["x"] += 1


def test_a_transform_of_batches_leaves_the_batches_of_the_source_as_they_are() -> None:
    batches = [{"x": np.zeros(2)}, {"x": np.zeros(2)}]
    loader = from_iterable(batches, batches=True, mixup_func=AddsOne()).numpy()
    assert [batch["x"].tolist() for _ in range(3) for batch in loader] == [[1, 1]] * 6


def pictures(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        for _ in range(100):
            noise = np.random.random()
        yield {"images": np.full((2, 2), number % 256, np.uint8), "labels": number % 3, "y": number, "noise": noise}


SAMPLES = [{"images": np.full((2, 2), 30 * number, np.uint8), "labels": number % 3} for number in range(8)]


@pytest.mark.parametrize("readers", READERS)
def test_a_stream_that_draws_is_mixed_once_in_each_read_mode(readers: str) -> None:
    options: dict[str, Any] = {"ends": "drop", "readers": readers, "mixup_func": Mixup(num_classes=3)}
    with closing(from_iterable(partial(pictures, 1000), 64, **options)) as loader:
        assert loader.mixup_func is None, "the trainer is not to mix again"
        assert np.concatenate([batch["y"] for batch in loader.numpy()]).tolist() == [*range(960)]


class DrawnMeanwhile:
    """A number; while a batch is made of it, another thread draws."""

    def __array__(self, *arguments: Any) -> np.ndarray:
        thread = threading.Thread(target=np.random.random)
        thread.start()
        thread.join()
        return np.zeros(())


@pytest.mark.parametrize("mixup", [None, Mixup(num_classes=3)])
def test_draws_of_another_thread_are_not_those_of_the_packages_own_collator(
    mixup: Any, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    samples = [{"name": "text", **each, "z": DrawnMeanwhile()} for each in SAMPLES]
    for source in (lambda: iter(samples), samples):
        assert len([*from_iterable(source, 4, mixup_func=mixup)]) == 2
    assert "draws from" not in caplog.text


class Prepared:
    """Samples below a wrapper that draws, without the attribute `dataset`."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitems__(self, indices: list[int]) -> Any:
        return [{**sample, "drawn": np.random.random()} for sample in self._samples.__getitems__(indices)]


class Preparing(BatchTransform):
    def prepared(self, dataset: Any) -> Any:
        return Prepared(Prepared(dataset))

    def __call__(self, fields: dict[str, np.ndarray], random: BatchRandom) -> None:
        fields["y"] += 1


def test_a_stream_can_be_prepared_by_wrappers_that_draw() -> None:
    first, second = ([*from_iterable(pictures(8), 4, mixup_func=Preparing()).numpy()] for _ in range(2))
    assert [batch["y"].tolist() for batch in first] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert all(np.array_equal(one["drawn"], other["drawn"]) for one, other in zip(first, second))


def test_a_stream_of_tuples_is_mixed_by_the_names_that_fields_gives() -> None:
    def pairs(epoch: int) -> Iterator[Any]:
        return ((each["images"], each["labels"]) for each in pictures(8))

    mixup = Mixup(num_classes=3)
    names = ("images", "labels")
    found = [*from_iterable(pairs, 4, fields=names, mixup_func=mixup, seed=1).numpy()]
    expected = [*from_iterable(lambda epoch: pictures(8), 4, fields=names, mixup_func=mixup, seed=1).numpy()]
    assert len(found) == 2
    for (images, labels), other in zip(found, expected):
        assert labels.shape == (4, 3) and np.array_equal(labels, other["labels"])
        assert np.array_equal(images, other["images"])


def test_tuples_that_are_mixed_reach_the_collator_by_their_names() -> None:
    pairs = [(each["images"], each["labels"]) for each in pictures(4)]

    def collate(samples: Any) -> Any:
        return {name: np.stack([sample[name] for sample in samples]) for name in ("images", "labels")}

    names, mixup = ("images", "labels"), Mixup(num_classes=3)
    of_list, of_stream = (
        next(iter(from_iterable(source, 4, fields=names, mixup_func=mixup, collate_fn=collate).numpy()))
        for source in (pairs, lambda epoch: iter(pairs))
    )
    assert all(np.array_equal(of_list[name], of_stream[name]) for name in names)
    with pytest.raises(SampleError, match=r"need a field 'labels'; they have \['0', '1'\].*fields=\['images'"):
        next(iter(from_iterable(pairs, 4, mixup_func=mixup)))


def mixed_images(source: Any, seed: int = 1, **arguments: Any) -> list[Any]:
    """The mixed images of the first batch of two epochs."""
    loader = DataLoader(source, seed=seed, mixup_func=Mixup(num_classes=3), **arguments)
    return [next(iter(loader.numpy()))["images"].tolist() for _ in range(2)]


def test_a_stream_is_mixed_by_the_seed_as_a_list_is() -> None:
    streamed, listed = (
        [mixed_images(source, seed, batch_size=8)[0] for seed in (1, 2)]
        for source in (lambda epoch: iter(SAMPLES), SAMPLES)
    )
    assert streamed == listed and streamed[0] != streamed[1]


def test_one_rank_may_read_a_shuffled_stream_for_all() -> None:
    every_rank, rank0 = (
        mixed_images(lambda: iter(SAMPLES), shuffle_buffer=1, batch_size=8, readers=readers)
        for readers in ("every_rank", "rank0")
    )
    assert rank0 == every_rank


def test_a_batch_is_mixed_in_another_way_in_each_epoch() -> None:
    for first, second in (
        mixed_images(lambda epoch: iter(SAMPLES), batch_size=8),
        mixed_images(SAMPLES, batch_size=8, sampler=range(8)),
        mixed_images(SAMPLES, batch_sampler=[[*range(8)]]),
    ):
        assert first != second


class Unmeasured:
    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length))


ENDING_SHORT: dict[str, Callable[[int, Any], Any]] = {
    "stream": lambda length, mixup: from_iterable(partial(pictures, length), 4, mixup_func=mixup),
    "list": lambda length, mixup: from_iterable([*pictures(length)], 4, mixup_func=mixup),
    "filter": lambda length, mixup: from_iterable(
        FilteredDataset([*pictures(length + 1)], [True] * length + [False]), 4, mixup_func=mixup
    ),
    "sampler": lambda length, mixup: DataLoader([*pictures(9)], 4, sampler=range(length), mixup_func=mixup),
    "unmeasured": lambda length, mixup: DataLoader([*pictures(9)], 4, sampler=Unmeasured(length), mixup_func=mixup),
}


@pytest.mark.parametrize("left", [1, 2, 3])
@pytest.mark.parametrize("make", ENDING_SHORT.values(), ids=ENDING_SHORT.keys())
def test_a_short_last_batch_repeats_a_row_if_a_pair_lacks_one(make: Any, left: int) -> None:
    loader = make(4 + left, Mixup(num_classes=3, label_smoothing=0.0))
    _, last = loader
    info = batch_info(last)
    assert info is not None and info.valid == left and len(last["y"]) == left + left % 2
    if left % 2:
        assert last["images"][left - 1].numpy().tolist() == np.full((2, 2), 3 + left).tolist()
        assert last["labels"][left - 1].numpy().tolist() == np.eye(3)[(3 + left) % 3].tolist()


@pytest.mark.parametrize("left", [1, 2, 3, 5])
@pytest.mark.parametrize("filters", [False, True])
def test_the_mesh_does_not_change_how_a_short_last_batch_is_mixed(left: int, filters: bool) -> None:
    dataset: Any = [*pictures(9 + left)][:-1]
    if filters:
        dataset = FilteredDataset([*dataset, dataset[0]], [True] * (8 + left) + [False])

    def last_images(ranks: int) -> list[Any]:
        parts = []
        for rank in range(ranks):
            set_mesh(ParallelMesh(ranks, 1, 1, rank=rank))
            try:
                loader = from_iterable(dataset, 8 // ranks, mixup_func=Mixup(num_classes=3), check_every=0)
                parts += [*loader.numpy()][-1]["images"].tolist()
            finally:
                set_mesh(None)
        return parts[:left]

    assert last_images(1) == last_images(2) == last_images(4)


def test_a_batch_sampler_with_an_odd_list_is_refused_at_the_start_if_rows_are_mixed() -> None:
    samples, mixup = [*pictures(7)], Mixup(num_classes=3)
    for lists, which in (([[0, 1], [2, 3, 4]], "the last batch"), ([[0, 1], [2, 3, 4], [5, 6]], "batch 1")):
        with pytest.raises(ConfigError, match=rf"{which} of the list has 3 rows .* of 2; let the batch_sampler"):
            DataLoader(samples, batch_sampler=lists, mixup_func=mixup)
    data = pytest.importorskip("torch.utils.data")
    pairs = data.BatchSampler(data.SequentialSampler(samples), 2, False)
    with pytest.raises(ConfigError, match=r"last batch of the BatchSampler has 1 rows .* of 2; let the batch_sampler"):
        DataLoader(samples, batch_sampler=pairs, mixup_func=mixup)
    pairs.drop_last = True
    assert len([*DataLoader(samples, batch_sampler=pairs, mixup_func=mixup)]) == 3


class GroupedByLength:
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3, 4]])


def test_a_batch_sampler_with_an_odd_list_is_named_when_the_list_comes() -> None:
    with pytest.raises(ConfigError, match=r"batch 1 has 3 rows .* of 2; let the batch_sampler"):
        [*DataLoader([*pictures(7)], batch_sampler=GroupedByLength(), mixup_func=Mixup(num_classes=3))]


def test_a_transform_that_prepares_samples_is_refused_for_batches() -> None:
    batches = [default_collate([*pictures(4)])]
    with pytest.raises(ConfigError, match="Mixup prepares samples, but list yields batches; load its samples instead"):
        from_iterable(batches, batches=True, mixup_func=Mixup(num_classes=3))


def shuffled_at_once() -> Iterator[dict[str, Any]]:
    return iter([{"x": number} for number in random.sample(range(400), 400)])


def drawing_later() -> Iterator[dict[str, Any]]:
    for number in range(400):
        yield {"x": number, "noise": np.random.random() if number else 0.0}


def drawing_in_torch() -> Iterator[dict[str, Any]]:
    torch = pytest.importorskip("torch")
    for number in torch.randperm(400).tolist():
        yield {"x": number}


def drawing_from_its_own(epoch: int) -> Iterator[dict[str, Any]]:
    return iter([{"x": number} for number in np.random.default_rng(epoch).permutation(400)])


@pytest.mark.parametrize(
    ("rows", "drawn"),
    [
        (shuffled_at_once, "random"),
        (drawing_later, "numpy.random"),
        (drawing_in_torch, "torch"),
        (drawing_from_its_own, ""),
    ],
)
def test_a_stream_that_draws_from_a_global_generator_is_read_and_told_once(
    rows: Any, drawn: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    with closing(from_iterable(rows, 4)) as loader:
        for _ in range(2):
            read: list[int] = []
            for batch in loader.numpy():
                read += batch["x"].tolist()
                random.random(), np.random.random()  # The training loop may draw.
            assert sorted(read) == [*range(400)]
    told = [text for text in caplog.messages if "which the whole program shares" in text]
    assert [text.split(", ")[0] for text in told] == [f"{rows.__qualname__} draws from {drawn}"] * bool(drawn)


def busily(value: Any) -> Any:
    for _ in range(5000):
        pass
    return value


def drawing_each_row(epoch: int) -> Iterator[dict[str, Any]]:
    return (busily({"x": number, "noise": np.random.random()}) for number in range(200))


def read_and_collate() -> Iterator[Any]:
    return iter(
        from_iterable(
            drawing_each_row, 4, prefetch=64, collate_fn=lambda samples: busily(default_collate(samples))
        ).numpy()
    )


def read_beside_a_list() -> Iterator[Any]:
    listed = DataLoader(Map([{"y": 0}] * 200, busily), 4)
    for batch, _ in zip(from_iterable(drawing_each_row, 4, prefetch=64).numpy(), listed.numpy()):
        yield batch


def read_beside_what_is_seeded() -> Iterator[Any]:
    for batch in from_iterable(drawing_each_row, 4, prefetch=64).numpy():
        with seeded(1):
            busily(None)
        yield batch


class TakesFromAStream:
    """Each sample is one of a stream that draws, which a loader of the dataset's own reads."""

    def __init__(self) -> None:
        self._batches = iter(from_iterable(drawing_each_row, 1, timeout=stretched(20), prefetch=1).numpy())

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return dict(next(self._batches))


def test_a_dataset_that_reads_a_stream_that_draws_does_not_wait_for_itself() -> None:
    dataset = TakesFromAStream()
    next(iter(DataLoader(dataset, 4).numpy()))  # Now it is known that the stream draws.
    assert len([*DataLoader(dataset, 4).numpy()]) == 2


@pytest.mark.parametrize("read", [read_and_collate, read_beside_a_list, read_beside_what_is_seeded])
def test_no_draw_of_a_stream_is_repeated_because_another_thread_restores_generators(
    read: Any, caplog: pytest.LogCaptureFixture
) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        noise = np.concatenate([batch["noise"] for batch in read()])
    finally:
        sys.setswitchinterval(interval)
    assert len(set(noise.tolist())) == 200
    assert "for several rows at once" not in caplog.text


@pytest.mark.parametrize(("rows", "ends"), [(0, "short"), (0, "pad"), (3, "drop")])
def test_an_iterable_without_a_batch_is_told(rows: int, ends: str, caplog: pytest.LogCaptureFixture) -> None:
    loader = from_iterable(lambda: ({"x": row} for row in range(rows)), 4, ends=ends)
    assert list(loader) == []
    assert "yields no batch" in caplog.text


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (lambda row: {"x": np.zeros(1, np.float32 if row < 4 else np.float64)}, "is float64, but float32 in the batch"),
        (lambda row: {"x": row, **({"y": row} if row >= 4 else {})}, r"the fields \['x', 'y'\], but the batch before"),
        (
            lambda row: {"x": [np.zeros(2)] * (1 + row // 4)},
            r"as {'x': \['tensor', 'tensor'\]}, but the batch before it as {'x': \['tensor'\]}; nest all batches alike",
        ),
        (lambda row: {"x": row if row < 4 else "text"}, "as {'x': 'str'}, but the batch before it as {'x': 'tensor'};"),
    ],
)
def test_a_batch_of_other_fields_or_dtypes_than_those_before_is_refused(item: Any, message: str) -> None:
    loader = from_iterable(lambda: map(item, range(8)), 2)
    with pytest.raises(SchemaError, match=message):
        list(loader)


@pytest.mark.parametrize("item", [{}, {"__key__": np.ones(3)}, Instance()])
def test_an_item_without_a_field_is_refused(item: Any) -> None:
    loader = from_iterable(lambda: iter([item] * 8), 2)
    with pytest.raises(SampleError, match="without a field"):
        next(iter(loader))


def test_an_interrupt_before_the_reading_thread_starts_leaves_nothing_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    unheard: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unheard.append)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", interrupted)
        next(iter(from_iterable(lambda: map(sample, range(4)), 2, prefetch=1)))
    gc.collect()
    assert not unheard


class WaitsAfterARow:
    def __init__(self, folder: Path) -> None:
        self.waits, self.goes_on = folder / "waits", folder / "goes on"

    def __iter__(self) -> Iterator[Any]:
        yield sample(0)
        self.waits.write_bytes(b".")
        with self.goes_on.open("rb", buffering=0) as event:
            event.read(1)


@pytest.mark.parametrize("options", [{}, slowly({"num_shards": 1, "num_workers": 1})])
def test_a_loader_that_waits_for_a_row_says_so_when_another_thread_closes_it(
    options: dict[str, Any], tmp_path: Path
) -> None:
    source = WaitsAfterARow(tmp_path)
    for path in (source.waits, source.goes_on):
        os.mkfifo(path)
    loader = from_iterable(source, 2, timeout=stretched(60), **options)

    def close() -> None:
        source.waits.read_bytes()
        loader.close()

    closing = threading.Thread(target=close)
    with open(os.open(source.goes_on, os.O_RDWR), "wb", buffering=0) as event:
        closing.start()
        with pytest.raises(PassError, match=r"the loader was closed; iter\(loader\) starts it again"):
            next(iter(loader))
        event.write(b".")
        closing.join()


def test_a_state_that_is_refused_leaves_the_loader_as_it_was() -> None:
    def batches(rows: int) -> Iterator[Any]:
        return ({"x": np.full(rows, number)} for number in range(4))

    other = from_iterable(partial(batches, 3), batches=True, ends="cycle")
    next(iter(other))
    loader = from_iterable(partial(batches, 2), batches=True)
    with pytest.raises(CheckpointError, match="an endless stream cannot continue"):
        loader.load_state_dict(other.state_dict())
    assert [batch.x.tensor.numpy().tolist() for batch in loader] == [[number, number] for number in range(4)]


def test_a_prefetcher_that_the_garbage_collector_closes_in_its_own_thread_ends() -> None:
    begins = threading.Event()

    def rows() -> Iterator[int]:
        begins.wait()
        yield from range(10)

    prefetcher = Prefetcher(lambda: (rows(), None), 1, 2, "numbers", 0, Flag())
    # The collector may run while the thread appends to the queue.
    setattr(prefetcher._shared, "groups", SimpleNamespace(put=lambda group: prefetcher._stop()))  # noqa: B010
    begins.set()
    prefetcher._thread.join(stretched(10))
    assert not prefetcher._thread.is_alive()


@pytest.mark.parametrize(
    "options", [{}, {"num_shards": 2, "num_workers": 2, "worker_type": "thread"}], ids=["stream", "shards"]
)
def test_a_ctrl_c_leaves_no_lock_of_the_reading_threads_locked(options: dict[str, Any]) -> None:
    def interrupt(frame: Any, event: str, called: Any) -> None:
        if event == "c_return" and called.__name__ == "__enter__" and frame.f_code.co_filename == threading.__file__:
            sys.setprofile(None)
            raise KeyboardInterrupt  # as by a signal that comes while a `with` acquires the lock

    def many(shard: int, num_shards: int) -> Iterator[Any]:
        return map(sample, range(shard, 1000, num_shards))

    before = set(threading.enumerate())
    loader = from_iterable(many, 4, ends="cycle", prefetch=1, **options)
    batches = iter(loader)
    next(batches)
    sys.setprofile(interrupt)
    try:
        with suppress(KeyboardInterrupt):
            next(batches)
        with suppress(KeyboardInterrupt):
            loader.close()
    finally:
        sys.setprofile(None)
    threads = set(threading.enumerate()) - before
    closing = threading.Thread(target=loader.close, daemon=True)
    closing.start()
    for thread in [closing, *threads]:
        thread.join(stretched(10))
        assert not thread.is_alive()
