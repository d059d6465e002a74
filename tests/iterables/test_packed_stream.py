"""Filters and packers of streams without a length: those of datasets, sample by sample, resumed at every cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data import DataLoader, from_iterable
from libai_data.data.datasets import OneRound, PackedDataset
from libai_data.errors import ConfigError, SampleError
from libai_data.iterables import FilteredStream, MappedStream, PackedStream
from libai_data.structures import Instance
from tests.iterables.rows import Listed, Rewinding
from tests.properties import examples, slowly

LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=30)
PACKING = st.sampled_from([{"cut": True}, *({"cut": False, "window": window} for window in (0, 1, 5, 16, 256))])


class Documents(Listed):
    """A stream of documents of these lengths, which counts what it reads."""

    reads = 0

    def item(self, number: int) -> Any:
        self.reads += 1
        return document(number, self.place)


def document(length: int, number: int) -> Any:
    return {"tokens": np.arange(length) + 100 * number, "mask": np.full(length, number % 2, bool)}


def keep(sample: Any) -> bool:
    return len(sample["tokens"]) % 3 != 1


def content(batch: Any) -> Any:
    return {name: array.tolist() for name, array in batch.items()}


def fields(sample: Any) -> Any:
    return {name: value.tensor.tolist() for name, value in sample.get_fields().items()}


@settings(max_examples=examples(25))
@given(LENGTHS, st.integers(1, 25), PACKING)
def test_sequences_of_a_stream_are_those_of_the_same_dataset(lengths: list[int], length: int, packing: Any) -> None:
    options: dict[str, Any] = {**packing, "truncate": not packing["cut"], "padding": {"tokens": -1}}
    documents = [document(each, number) for number, each in enumerate([*lengths, 3])]
    packed = OneRound(PackedDataset([each for each in documents if keep(each)], length, **options))
    stream = PackedStream(FilteredStream(lambda: iter(documents), keep), length, **options)
    expected = [fields(packed[row]) for row in range(len(packed))]
    for _ in range(2):
        assert [fields(each) for each in stream] == expected


@settings(max_examples=examples(25))
@given(LENGTHS, st.integers(1, 25), PACKING, st.integers(0, 30), st.sampled_from(["cycle", "short"]))
def test_every_cut_continues_exactly_from_the_state_of_the_stream(
    lengths: list[int], length: int, packing: Any, batches: int, ends: str
) -> None:
    lengths = [*lengths, 3]

    def loader(stateful: bool = True) -> Any:
        stream = Documents(lengths) if stateful else lambda: iter(Documents(lengths))
        packed = PackedStream(FilteredStream(stream, keep), length, truncate=not packing["cut"], **packing)
        return from_iterable(packed, 2, ends=ends)

    whole, stopped, resumed, plain = loader(), loader(), loader(), loader(stateful=False)
    expected = [content(batch) for batch in islice(whole.numpy(), batches + 5)]
    assert expected == [content(batch) for batch in islice(plain.numpy(), batches + 5)]
    found = [content(batch) for batch in islice(stopped.numpy(), batches)]
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    if len(expected) > batches:
        assert found + [content(batch) for batch in islice(resumed.numpy(), 5)] == expected


class BeginsAnew(Rewinding):
    """Documents whose state at the end of an epoch is that of its beginning."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def item(self, number: int) -> Any:
        return {"tokens": np.arange(number) + 100 * self.place + 1000 * self.epoch}


@pytest.mark.parametrize("ends", ["cycle", "short"])
@pytest.mark.parametrize("rows", [1, slowly(2), 3])
@pytest.mark.parametrize("options", [{}, *({"cut": False, "window": window} for window in (0, 2, 7, 256))])
def test_a_resume_repeats_no_epoch_of_an_iterable_that_begins_anew_at_its_end(
    options: Any, rows: int, ends: str
) -> None:
    def loader() -> Any:
        return from_iterable(PackedStream(BeginsAnew([3, 5, 2, 4, 6, 1, 3]), 8, **options), rows, ends=ends)

    def of_three_passes(loader: Any, count: int) -> list[Any]:
        return [content(batch) for _ in range(3) for batch in islice(loader.numpy(), count)][:count]

    expected, stopped = of_three_passes(loader(), 6), loader()
    assert len(expected) == 6 or ends == "short"
    batches = (batch for _ in range(2) for batch in stopped.numpy())
    for cut, _ in enumerate(islice(batches, len(expected) - 1), 1):
        resumed = loader()
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert of_three_passes(resumed, 6 - cut)[: len(expected) - cut] == expected[cut:]


def test_long_streams_of_many_lengths_are_packed_without_a_gap() -> None:
    lengths = np.random.default_rng(1).integers(1, 40, 500).tolist()
    documents = [document(length, number) for number, length in enumerate(lengths)]
    tokens = np.concatenate([each["tokens"] for each in documents])
    packed = np.concatenate([each.tokens.tensor for each in PackedStream(lambda: iter(documents), 64)])
    assert packed[: len(tokens)].tolist() == tokens.tolist() and len(packed) - len(tokens) < 64


def test_a_window_fills_sequences_that_samples_in_their_order_leave_open() -> None:
    lengths = np.random.default_rng(1).integers(1, 64, 2000).tolist()
    documents = [document(length, number) for number, length in enumerate(lengths)]
    packs = {window: list(PackedStream(lambda: iter(documents), 64, cut=False, window=window)) for window in (0, 256)}
    for each in packs.values():
        found = np.concatenate([pack.tokens.tensor[pack.segment_ids.tensor > 0] for pack in each])
        assert sorted(found.tolist()) == sorted(np.concatenate([each["tokens"] for each in documents]).tolist())
    fill = {window: sum(lengths) / 64 / len(each) for window, each in packs.items()}
    assert fill[0] < 0.8 and fill[256] > 0.97


@pytest.mark.parametrize("options", [{}, {"cut": False, "window": 32}])
def test_a_resume_reads_only_the_samples_of_the_next_sequences(options: Any) -> None:
    stopped = from_iterable(PackedStream(Documents([5] * 1000), 64, **options), 2)
    batches = iter(stopped)
    next(islice(batches, 30, 31))
    source = Documents([5] * 1000)
    resumed = from_iterable(PackedStream(source, 64, **options), 2, prefetch=1)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert (next(iter(resumed))["tokens"].numpy() == next(batches)["tokens"].numpy()).all()
    assert source.reads < 200


@pytest.mark.parametrize("changed", [{"length": 32}, {"cut": True, "window": None}, {"window": 16}])
def test_a_resume_with_other_packing_is_refused(changed: Any) -> None:
    options: dict[str, Any] = {"length": 64, "cut": False, "window": 32}
    stopped = from_iterable(PackedStream(Documents([5] * 1000), **options), 2)
    next(iter(stopped))
    resumed = from_iterable(PackedStream(Documents([5] * 1000), **{**options, **changed}), 2)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    with pytest.raises(SampleError, match=r"saved with .* \[64, False, 32\] of PackedStream, which are now \["):
        next(iter(resumed))


def test_shards_are_packed_each_by_itself_in_processes() -> None:
    def shards(shard: int, num_shards: int) -> Iterator[Any]:
        return (document(7, number) for number in range(shard, 41, num_shards))

    loader = DataLoader(PackedStream(shards, 16), 4, num_shards=2, num_workers=2)
    found = sorted(row for batch in loader.numpy() for row in batch["tokens"][batch["segment_ids"] > 0].tolist())
    assert found == sorted(token for number in range(41) for token in document(7, number)["tokens"].tolist())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PackedStream([document(1, 1)], 16), "list has a length .* use PackedDataset"),
        (lambda: FilteredStream([document(1, 1)], keep), "use FilteredDataset"),
        (lambda: FilteredStream(lambda: iter(()), 5), "keep is 5"),  # type: ignore[arg-type]
        (lambda: PackedStream(lambda: iter(()), 0), "length of an output is 0"),
        (lambda: PackedStream(lambda: iter(()), 4, lengths=[1]), "no argument 'lengths'"),
        (lambda: PackedStream(lambda: iter(()), 4, cuts=True), "cuts"),
        (
            lambda: from_iterable(PackedStream(lambda: iter(()), 4), 2, batches=True).close(),
            "yields samples, not batches",
        ),
    ],
)
def test_what_cannot_be_packed_or_filtered_is_refused(make: Any, message: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=message):
        make()


def test_a_sample_that_does_not_fit_is_refused_with_the_choices() -> None:
    loader = from_iterable(PackedStream(lambda: iter([document(9, 1)]), 4, cut=False), 1)
    with pytest.raises(SampleError, match=r"has 9 tokens, which do not fit .* of 4; set cut=True, truncate=True"):
        next(iter(loader))


class Document(NamedTuple):
    tokens: Any


@dataclass
class Text:
    tokens: Any


@pytest.mark.parametrize("form", [Document, Text, lambda tokens: Instance(tokens=tokens), partial(dict, __key__="a")])
def test_samples_of_any_form_with_names_are_packed(form: Any) -> None:
    loader = from_iterable(PackedStream(lambda: iter([form(tokens=np.arange(3))] * 4), 6), 2)
    batch = next(iter(loader.numpy()))
    assert batch["tokens"].tolist() == [[0, 1, 2, 0, 1, 2]] * 2
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 2]] * 2


@pytest.mark.parametrize(
    ("tokens", "padding", "message"),
    [
        ([np.arange(3)], {"token": 1}, r"padding is set for 'token', but .* \['tokens'\]. Did you mean 'tokens'"),
        ([np.arange(3, dtype=np.uint8)], {"tokens": -1}, "padded with -1, which its dtype uint8 cannot hold"),
        ([np.arange(3)], {"tokens": 0.5}, r"padded with 0\.5, which its dtype int64 cannot hold"),
        ([np.arange(3), np.arange(3.0)], {}, r"'tokens' of samples that are packed .* float64 \[\] or int64 \[\]"),
        ([np.ones((3, 2)), np.ones((3, 1))], {}, r"'tokens' of .* float64 \[1\] or float64 \[2\]"),
    ],
)
def test_what_would_change_tokens_or_padding_is_refused(tokens: list[Any], padding: Any, message: str) -> None:
    source = [{"tokens": each} for each in tokens]
    loader = from_iterable(PackedStream(lambda: iter(source), 8, padding=padding), 1)
    with pytest.raises(SampleError, match=message):
        next(iter(loader))


@pytest.mark.parametrize("kind", [MappedStream, FilteredStream, PackedStream])
def test_an_iter_of_a_subclass_which_no_loader_would_call_is_refused(kind: type) -> None:
    with pytest.raises(TypeError, match=f"Changed has an __iter__ of its own, but a loader reads a {kind.__name__}"):
        type("Changed", (kind,), {"__iter__": iter})
    assert issubclass(type("Same", (kind,), {}), kind)
