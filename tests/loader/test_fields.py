"""Fields of all kinds: every dtype of OneFlow, every shape, and clear errors for what cannot be a tensor."""

from __future__ import annotations

import enum
import math
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from libai_data import DataLoader, from_iterable
from libai_data.data.items import as_leaf, contents_of
from libai_data.data.samplers import CyclicSampler
from libai_data.data.transforms import Mixup
from libai_data.delivery import to_global
from libai_data.errors import ConfigError, DataPipelineError, SampleError, SchemaError
from libai_data.loader import PadCollator
from libai_data.loader.default_collate import default_collate
from libai_data.loader.sample_form import flat_fields, form_of
from libai_data.structures import DistTensorData, Instance
from tests.loader.sample_datasets import Fields, NumberDicts, OfAnyForm, Ragged, stack_dicts
from tests.loader.streams import WORKER_NAMES, WORKERS, content, loading, stream
from tests.properties import examples, slowly

DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64")
FOREIGN_DTYPES = ("int16", "uint16", "uint32", "uint64", "complex64", "complex128")
EVERYWHERE = pytest.mark.parametrize("workers", [*WORKERS[:3], slowly(WORKERS[3])], ids=WORKER_NAMES)
# Spawned workers differ from forked ones in how they start only.
WITHOUT_SPAWN = pytest.mark.parametrize("workers", WORKERS[:3], ids=WORKER_NAMES[:3])


def batch_of(dataset: Any, **arguments: Any) -> dict[str, np.ndarray]:
    with loading(dataset, **arguments) as loader:
        batch = next(iter(loader))
        return {name: data.tensor.numpy().copy() for name, data in batch.get_fields().items()}


@pytest.mark.parametrize("shape", [(4,), (2, 2), ()])
@pytest.mark.parametrize("in_instance", [False, True])
def test_a_masked_sample_among_others_is_refused(in_instance: bool, shape: tuple[int, ...]) -> None:
    def sample(index: int) -> Any:
        data = DistTensorData(np.zeros(shape))
        data.tensor = np.ma.masked_array(np.zeros(shape), np.full(shape, index == 3))
        return Instance(x=data) if in_instance else {"x": data.tensor}

    samples = [sample(index) for index in range(4)]
    with loading(samples) as loader, pytest.raises(SampleError, match=r"sample 3 .*filled"):
        next(iter(loader))


@EVERYWHERE
@pytest.mark.parametrize("collate_fn", [None, stack_dicts])
def test_every_dtype_of_oneflow_and_every_shape_pass_unchanged(workers: dict[str, Any], collate_fn: Any) -> None:
    generator = np.random.default_rng(1)
    fields = {
        f"of_{dtype}": generator.integers(0, 2, (3, 2)).astype(dtype)
        if dtype == "bool"
        else (generator.random((3, 2)) * 100).astype(dtype)
        for dtype in DTYPES
    }
    fields.update(empty=np.zeros((0,), np.float32), flat=np.zeros((3, 0, 2), np.int64), scalar=np.array(7))
    found = batch_of(Fields(fields), collate_fn=collate_fn, **workers)
    for name, value in fields.items():
        expected = np.stack([value] * 4)
        assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape)
        assert found[name].tobytes() == expected.tobytes()


@settings(max_examples=examples(60))
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_any_bytes_pass_unchanged(data: st.DataObject, dtype: str) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
    value = data.draw(arrays(np.dtype(dtype), shape))
    found = batch_of(Fields({"value": value}), num_workers=2, worker_type="thread")["value"]
    assert found.shape == (4, *shape)
    assert found.tobytes() == value.tobytes() * 4


@EVERYWHERE
def test_a_sample_of_zero_bytes_passes(workers: dict[str, Any]) -> None:
    with loading(Fields({"empty": np.zeros((0, 2), np.float32)}, 40), **workers) as loader:
        shapes = [batch.empty.tensor.numpy().shape for batch in islice(loader, 20)]
    assert shapes == [(4, 0, 2)] * 20


@EVERYWHERE
def test_numbers_and_lists_become_oneflows_types(workers: dict[str, Any]) -> None:
    found = batch_of(
        Fields({"whole": 3, "real": 0.5, "truth": True, "numbers": [1, 2], "nested": [[0.5], [1.5]]}), **workers
    )
    assert {name: (str(array.dtype), array.shape) for name, array in found.items()} == {
        "whole": ("int64", (4,)),
        "real": ("float32", (4,)),
        "truth": ("bool", (4,)),
        "numbers": ("int64", (4, 2)),
        "nested": ("float32", (4, 2, 1)),
    }


@EVERYWHERE
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, "two"], [[1] * 4, ["two"] * 4]),
        ([1, {"three": 3, "four": "4"}], [[1] * 4, {"three": [3] * 4, "four": ["4"] * 4}]),
        ([1, [2, 3]], [[1] * 4, [[2, 3]] * 4]),
        ([1, np.float32(2)], [[1, 2]] * 4),
    ],
)
def test_a_list_that_holds_more_than_numbers_is_collated_value_by_value(
    workers: dict[str, Any], value: Any, expected: Any
) -> None:
    with loading(Fields({"mixed": value}), **workers) as loader:
        assert plain(dict(next(iter(loader)))) == {"mixed": expected}


@EVERYWHERE
def test_arrays_that_are_not_contiguous_are_read_by_value(workers: dict[str, Any]) -> None:
    grid = np.arange(12, dtype=np.int64).reshape(3, 4)
    found = batch_of(Fields({"turned": grid.T, "every_second": grid[:, ::2], "backwards": grid[::-1]}), **workers)
    assert found["turned"].tolist() == [grid.T.tolist()] * 4
    assert found["every_second"].tolist() == [grid[:, ::2].tolist()] * 4
    assert found["backwards"].tolist() == [grid[::-1].tolist()] * 4


NO_TENSORS: list[Any] = [None, object(), [1, None], np.array(["a"]), np.array([None]), lambda: 1]


@WITHOUT_SPAWN
@pytest.mark.parametrize(
    ("value", "message"),
    [*((np.zeros(2, dtype), f"field 'odd': .*{dtype}.*int64") for dtype in FOREIGN_DTYPES)]
    + [(value, r"'odd(\.1)?'") for value in NO_TENSORS],
)
def test_what_cannot_be_a_tensor_is_refused_by_name(workers: dict[str, Any], value: Any, message: str) -> None:
    with pytest.raises(DataPipelineError, match=message):
        batch_of(Fields({"fine": 1, "odd": value}), **workers)


def test_a_list_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(DataPipelineError, match="sample 0 of Fields"):
        batch_of(Fields({"x": endless}))


@WITHOUT_SPAWN
@pytest.mark.parametrize("sample", [[1, 2], 5, None, {}], ids=["list", "int", "None", "no fields"])
def test_a_sample_without_named_fields_is_refused(workers: dict[str, Any], sample: Any) -> None:
    with pytest.raises(DataPipelineError, match=r"Instance|without a (name|field)|is None"):
        batch_of([sample] * 8, **workers)


class Changing(Fields):
    """Sample 6 differs."""

    def __init__(self, **changes: Any) -> None:
        super().__init__({"a": np.zeros(2, np.float32), "b": 1, "of": {"c": 1}}, 16)
        self.changes = changes

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if index == 6:
            sample = {name: value for name, value in {**sample, **self.changes}.items() if value is not None}
        return sample


CHANGES: dict[str, Any] = {
    "shape": ({"a": np.zeros(3, np.float32)}, r"sample 6 .*field 'a' is float32 \[3\].*float32 \[2\].*padding"),
    "dtype": ({"a": np.zeros(2, np.float64)}, r"sample 6 .*field 'a' is float64"),
    "dims": ({"b": [1]}, r"sample 6 .*field 'b' is int64 \[1\]"),
    "missing": ({"b": None}, r"sample 6 .*missing \['b'\]"),
    "extra": ({"c": 1}, r"sample 6 .*unexpected \['c'\]"),
    "renamed": ({"b": None, "c": 1}, r"sample 6 .*missing \['b'\], unexpected \['c'\]"),
    "nested otherwise": ({"of": {"d": 1}}, r"sample 6 .*missing \['of.c'\], unexpected \['of.d'\]"),
    "layout": ({"b": DistTensorData(1, placement_idx=-1)}, r"sample 6 .*field 'b' is laid out .* layer -1"),
}


@WITHOUT_SPAWN
@pytest.mark.parametrize(("changes", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_a_sample_unlike_the_ones_before_it_is_refused(workers: dict[str, Any], changes: Any, message: str) -> None:
    with loading(Changing(**changes), **workers) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(DataPipelineError, match=f"(?s){message}"):
            next(iterator)
        assert loader.state_dict()["position"] == 4


@WITHOUT_SPAWN
@pytest.mark.parametrize("kind", [Counter, partial(defaultdict, int)])
def test_a_dict_makes_up_no_field_that_its_sample_lacks(workers: dict[str, Any], kind: Any) -> None:
    dataset = OfAnyForm(lambda index: kind({"a": index, "c" if index == 6 else "b": 1}))
    with loading(dataset, **workers) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(SampleError, match=r"(?s)sample 6 .*missing \['b'\], unexpected \['c'\]"):
            next(batches)


class Doubling(dict[str, Any]):
    """Decodes a value when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return value if isinstance(value, dict) else 2 * value


@EVERYWHERE
@pytest.mark.parametrize("collate_fn", [None, default_collate])
def test_a_dict_that_decodes_its_values_decodes_those_of_each_row(workers: dict[str, Any], collate_fn: Any) -> None:
    dataset = OfAnyForm(lambda index: Doubling(x=np.full(2, index), of=Doubling(y=np.full(1, index))))
    with loading(dataset, collate_fn=collate_fn, **workers) as loader:
        assert plain(dict(next(iter(loader)))) == {
            "x": [[0, 0], [2, 2], [4, 4], [6, 6]],
            "of": {"y": [[0], [2], [4], [6]]},
        }


class Name(str, enum.Enum):
    X = "x"
    Y = "y"


@EVERYWHERE
@pytest.mark.parametrize("collate_fn", [None, default_collate])
def test_names_that_are_members_of_an_enum_are_their_texts(workers: dict[str, Any], collate_fn: Any) -> None:
    dataset = OfAnyForm(lambda index: {Name.X: index, "of": {Name.Y: index}})
    with loading(dataset, collate_fn=collate_fn, **workers) as loader:
        batch = next(iter(loader))
        assert batch["x"].numpy().tolist() == [0, 1, 2, 3]
        assert [*to_global(batch)] == [*batch] == ["x", "of"]
        assert [type(name) for name in batch] == [str, str]
        assert batch["of"]["y"].numpy().tolist() == [0, 1, 2, 3]


@EVERYWHERE
def test_the_order_in_which_a_sample_names_its_fields_does_not_matter(workers: dict[str, Any]) -> None:
    def turned(index: int) -> dict[str, Any]:
        fields = {"a": index, "b": 100 + index}
        return fields if index % 2 else dict(reversed(list(fields.items())))

    found = batch_of(OfAnyForm(turned), **workers)
    assert found["a"].tolist() == [0, 1, 2, 3]
    assert found["b"].tolist() == [100, 101, 102, 103]


@EVERYWHERE
def test_ragged_samples_are_refused_with_advice(workers: dict[str, Any]) -> None:
    with pytest.raises(DataPipelineError, match="padding collator"):
        batch_of(Ragged(64), **workers)


PAD = PadCollator({"tokens": {"value": -1, "side": "left", "multiple": 4}})


@EVERYWHERE
def test_ragged_samples_are_padded_alike_everywhere(workers: dict[str, Any]) -> None:
    dataset = Ragged(64)
    found = stream(dataset, batches=20, collate_fn=PAD, **workers)
    assert found == stream(dataset, batches=20, collate_fn=PAD)
    with loading(dataset, collate_fn=PAD, **workers) as loader:
        for step, batch in enumerate(islice(loader, 20)):
            first = step * 4 % 64
            rows = batch.tokens.tensor.numpy().tolist()
            expected = [list(range(index, index + index % 7 + 1)) for index in range(first, first + 4)]
            length = -(-max(len(row) for row in expected) // 4) * 4
            assert rows == [[-1] * (length - len(row)) + row for row in expected]
            assert batch.index.tensor.numpy().tolist() == list(range(first, first + 4))


LAID_OUT = [
    Instance(
        tokens=DistTensorData(np.zeros(2), ["split_0", "split_1"], placement_idx=0),
        labels=DistTensorData(np.zeros(2), ["broadcast", "broadcast"], placement_idx=-1),
        bare=np.zeros(2),
    )
] * 8


@EVERYWHERE
@pytest.mark.parametrize("collate_fn", [None, PadCollator({"tokens": {}})])
@pytest.mark.parametrize(
    ("layouts", "tokens", "bare"),
    [
        (None, (("split_0", "split_1"), 0), (("split_0", "broadcast"), 0)),
        (
            {"tokens": {"placement_idx": 2}, "bare": {"sbp_list": ["broadcast", "split_1"]}},
            (("split_0", "split_1"), 2),
            (("broadcast", "split_1"), 0),
        ),
    ],
)
def test_a_batch_has_the_layouts_of_its_samples_of_which_a_config_overrides_parts(
    workers: dict[str, Any], collate_fn: Any, layouts: Any, tokens: Any, bare: Any
) -> None:
    [(_, fields)] = stream(LAID_OUT, batches=1, collate_fn=collate_fn, layouts=layouts, **workers)
    expected = {"tokens": tokens, "labels": (("broadcast", "broadcast"), -1), "bare": bare}
    assert {name: field[3] for name, field in fields.items()} == expected


@EVERYWHERE
def test_a_layout_for_a_field_that_is_not_there_is_refused_with_the_nearest_name(workers: dict[str, Any]) -> None:
    with pytest.raises(DataPipelineError, match=r"layouts.lables.*Did you mean 'labels'"):
        stream(LAID_OUT, batches=1, layouts={"lables": {"placement_idx": 0}}, **workers)


@EVERYWHERE
def test_a_batch_that_is_handed_out_may_be_written_to(workers: dict[str, Any]) -> None:
    dataset = Fields({"x": np.ones(3, np.float32)}, 100)
    with loading(dataset, prefetch=2, **workers) as loader:
        for batch in islice(loader, 30):
            assert content(batch)[1]["x"][2] == np.ones((4, 3), np.float32).tobytes()
            batch.x.tensor.zero_()


class Pair(NamedTuple):
    x: Any
    name: str


FORMS: list[tuple[Any, Any, Any]] = [
    (lambda i: (np.full(2, i), i), ["x", "y"], {"x": [[0, 0], [1, 1], [2, 2], [3, 3]], "y": [0, 1, 2, 3]}),
    (lambda i: np.full(1, i), ["x"], {"x": [[0], [1], [2], [3]]}),
    (lambda i: {"x": i, "y": i, "note": object()}, ["y"], {"y": [0, 1, 2, 3]}),
    (lambda i: Pair(i, f"no {i}"), None, {"x": [0, 1, 2, 3], "name": ["no 0", "no 1", "no 2", "no 3"]}),
    (lambda i: Pair(i, f"no {i}"), ["x"], {"x": [0, 1, 2, 3]}),
    (lambda i: {"a": {"b": (i, [np.ones(1)])}}, None, {"a": {"b": ([0, 1, 2, 3], [[[1.0]] * 4])}}),
    (lambda i: Instance(x=DistTensorData([i]), of={"file": "ab"[i % 2] * i}), None,
     {"x": [[0], [1], [2], [3]], "of": {"file": ["", "b", "aa", "bbb"]}}),
]  # fmt: skip


def plain(value: Any) -> Any:
    """A batch's value, with lists in the place of tensors."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(plain(item) for item in value)
    return value.numpy().tolist() if hasattr(value, "numpy") else value


@EVERYWHERE
@pytest.mark.parametrize(("sample", "names", "expected"), FORMS, ids=[str(number) for number in range(len(FORMS))])
def test_samples_of_any_form_become_batches_of_that_form(
    workers: dict[str, Any], sample: Any, names: Any, expected: Any
) -> None:
    dataset = OfAnyForm(sample)
    with loading(dataset, fields=names, **workers) as loader:
        batches = [plain(dict(batch)) for batch in islice(iter(loader), 2)]
    assert batches[0] == expected
    assert (batches[1].keys() == expected.keys() and batches[1] != expected) or "a" in expected


@EVERYWHERE
@pytest.mark.parametrize("names", [None, ["x", "name"]])
@pytest.mark.parametrize("kind", [tuple, Pair])
def test_a_batch_of_tuples_unpacks_into_values_and_any_other_into_names(
    workers: dict[str, Any], kind: Any, names: Any
) -> None:
    tuples = OfAnyForm(lambda index: (index, f"no {index}") if kind is tuple else Pair(index, f"no {index}"))
    known = ["0", "1"] if kind is tuple and names is None else ["x", "name"]
    with loading(tuples, fields=names, **workers) as loader:
        for batch in islice(loader, 2):
            x, name = batch
            x_local = x
            assert x is batch[0] is batch[known[0]] and name == batch[-1] == batch[known[1]]
            assert [f"no {number}" for number in x.numpy().tolist()] == name
            assert list(batch.keys()) == list(dict(batch)) == known and known[0] in batch and len(batch) == 2
            whole: Any = to_global(batch)
            x, name = whole
            assert x is whole[0] is whole[known[0]] and x.is_global and name == whole[1]
            assert (lambda *values, **fields: [*values, *fields])(**whole) == list(dict(whole)) == known
            assert batch[:1][0] is x_local and batch[-1:] == (batch[1],) and whole[:1][0] is x and whole[1:] == (name,)
            with pytest.raises(KeyError, match="labels"):
                whole["labels"]
            del batch[1]
            batch[0] = x_local + 1
            assert [*batch.keys()] == known[:1] and batch.get_fields()[known[0]].sbp_list == ["split_0", "broadcast"]
    fields = OfAnyForm(lambda index: {"x": index, "name": f"no {index}"})
    with loading(fields, fields=names, **workers) as loader:
        batch = next(iter(loader))
        assert list(batch) == list(to_global(batch)) == ["x", "name"]
        with pytest.raises(KeyError):
            batch[0]


@EVERYWHERE
@pytest.mark.parametrize("collate_fn", [None, default_collate])
@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_matrices_and_strings_with_surrogates_pass(workers: dict[str, Any], collate_fn: Any) -> None:
    """As in names of files that are no UTF-8."""
    name = b"caf\xe9".decode(errors="surrogateescape") + "\ud800"
    dataset = OfAnyForm(lambda index: {"x": np.matrix([[index, 2]]), "name": name})
    with loading(dataset, CyclicSampler(dataset, 2), collate_fn=collate_fn, **workers) as loader:
        assert plain(dict(next(iter(loader)))) == {"x": [[[0, 2]], [[1, 2]]], "name": [name, name]}


PADDED = {
    "tokens": [[0, -1], [0, 1]],
    "text": ["no 0", "no 1"],
    "about": {"id": [0, 1], "files": (["a", "a"], [[0], [1]]), "more": [[0, 0], [1, 0]]},
}


@EVERYWHERE
def test_padding_leaves_strings_and_nested_values_as_they_are(workers: dict[str, Any]) -> None:
    def sample(index: int) -> Any:
        about = {"id": index, "files": ("a", [index]), "more": np.full(1, index)}
        return {"tokens": np.arange(1 + index), "text": f"no {index}", "about": about}

    padding = PadCollator({"tokens": {"value": -1}, "about.more": {"multiple": 2}})
    dataset = OfAnyForm(sample)
    with loading(dataset, CyclicSampler(dataset, 2), collate_fn=padding, **workers) as loader:
        assert plain(dict(next(iter(loader)))) == PADDED
    for name, message in (
        ("text", "of sample [01] is text; pad"),
        ("abuot", "Did you mean 'about"),
        ("about", "about.id"),
    ):
        padding = PadCollator({name: {}})
        with loading(dataset, collate_fn=padding, **workers) as loader, pytest.raises(DataPipelineError, match=message):
            next(iter(loader))


class Together(list[Any]):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [list, Together])
def test_tuples_are_mixed_by_the_names_that_fields_gives_them(kind: Any) -> None:
    samples = [(np.full((2, 2), number, np.uint8), number % 3) for number in range(4)]
    with_names = [{"images": image, "labels": label} for image, label in samples]
    names, mixup = ["images", "labels"], Mixup(num_classes=3)
    [found] = DataLoader(kind(samples), 4, fields=names, mixup_func=mixup).numpy()
    [expected] = DataLoader(with_names, 4, mixup_func=mixup).numpy()
    assert all((found[name] == expected[name]).all() for name in names) and expected["labels"].shape == (4, 3)
    images, labels = found
    assert images is found["images"] and labels is found["labels"] and [*expected] == names


@WITHOUT_SPAWN
def test_fields_are_chosen_before_a_collator_sees_the_samples(workers: dict[str, Any]) -> None:
    def collate(samples: list[Any]) -> Any:
        assert [*map(len, samples)] == [2] * 4
        return np.stack([sample[1] + sample.y for sample in samples]), [f"{sample.x}" for sample in samples]

    dataset = OfAnyForm(lambda index: (index, np.full(1 + index % 3, index)))
    with loading(dataset, fields=["x", "y"], collate_fn=PadCollator({"y": {}}), **workers) as loader:
        assert plain(dict(next(iter(loader)))) == {"x": [0, 1, 2, 3], "y": [[0, 0, 0], [1, 1, 0], [2, 2, 2], [3, 0, 0]]}
    even = OfAnyForm(lambda index: (index, np.full(1, index)))
    with loading(even, fields=["x", "y"], collate_fn=collate, **workers) as loader:
        assert plain(dict(next(iter(loader)))) == {"x": [[0], [2], [4], [6]], "y": ["0", "1", "2", "3"]}


PARTS = (np.arange(3), np.float32(2), True, 7, 0.5)
NESTS = ({"x": 1}, (1, 2), [np.arange(2), 1], "text", None)


@settings(max_examples=examples(100))
@given(
    parts=st.lists(st.sampled_from(PARTS) | st.sampled_from(NESTS), max_size=3),
    names=st.none() | st.sampled_from([("x",), ("x", "y"), ("y", "x", "z")]),
    is_tuple=st.booleans(),
)
def test_flat_samples_have_the_fields_that_form_of_finds(parts: list[Any], names: Any, is_tuple: bool) -> None:
    sample = tuple(parts) if is_tuple else dict(zip("xyz", parts))
    fields = flat_fields(sample, names)
    if fields:
        leaves = {name: as_leaf(value, name) for name, value in fields.items()}
        assert contents_of(leaves) == contents_of(form_of(sample, names).fields)
        assert [*leaves] == [*form_of(sample, names).fields]
    # Datasets of PyTorch return such tuples. To look for nested values took most of the time of their batches.
    assert flat_fields((np.zeros(2), 1), None).keys() == {"0", "1"}
    assert flat_fields({"x": 1, "y": 2, "z": "text"}, ("x", "y")) == {"x": 1, "y": 2}


class Reusing:
    """Returns one array again and again."""

    def __init__(self, overwrites: bool) -> None:
        self._array, self._overwrites = np.zeros(2), overwrites

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._array += self._overwrites
        return {"x": self._array, "index": np.array(index)}


class ReusingTogether(Reusing):
    """The same through `__getitems__`, and with numbers that it draws."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{**self[index], "drawn": np.random.rand()} for index in indices]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "drawn": np.random.rand()}


class ReusingCollator(threading.local):
    """Makes each batch in the same memory, which is another one in each thread."""

    def __init__(self) -> None:
        self._memory = np.zeros(4)

    def __call__(self, samples: list[Any]) -> dict[str, np.ndarray]:
        self._memory[:] = [sample["index"] for sample in samples]
        return {"index": self._memory}


@WITHOUT_SPAWN
def test_a_dataset_that_overwrites_its_samples_is_refused_where_a_collator_gets_several(
    workers: dict[str, Any],
) -> None:
    with pytest.raises(DataPipelineError, match=r"field 'x' of a sample of Reusing overwrites .* return a copy"):
        batch_of(Reusing(overwrites=True), collate_fn=stack_dicts, **workers)
    assert batch_of(Reusing(overwrites=True), **workers)["x"].shape == (4, 2)
    assert not batch_of(Reusing(overwrites=False), collate_fn=stack_dicts, **workers)["x"].any()


@pytest.mark.parametrize("options", [{}, {"collate_fn": stack_dicts}, {"on_error": "skip"}])
def test_samples_read_together_that_overwrite_each_other_are_refused(options: dict[str, Any]) -> None:
    with (
        pytest.raises(DataPipelineError, match=r"field 'x' of a sample of ReusingTogether overwrites"),
        loading(ReusingTogether(overwrites=True), **options) as loader,
    ):
        list(islice(loader, 8))
    assert not batch_of(ReusingTogether(overwrites=False), **options)["x"].any()


@pytest.mark.parametrize("nested", [False, True])
def test_buffers_that_a_dataset_uses_in_turn_are_found(nested: bool) -> None:
    buffers = np.zeros((3, 2))

    def sample(index: int) -> dict[str, Any]:
        buffers[index % 3] = index
        return {"x": [{"y": buffers[index % 3]}] if nested else buffers[index % 3]}

    with pytest.raises(DataPipelineError, match=r"field 'x' of a sample of .* overwrites .* return a copy"):
        batch_of(OfAnyForm(sample), collate_fn=lambda samples: {"x": np.zeros(len(samples))})


@WITHOUT_SPAWN
def test_batches_stay_when_a_collator_uses_its_memory_again(workers: dict[str, Any]) -> None:
    with loading(Reusing(overwrites=False), collate_fn=ReusingCollator(), **workers) as loader:
        batches = list(islice(loader, 3))
    indices = [np.asarray(batch.get("index").tensor.numpy()).tolist() for batch in batches]
    assert len(set(map(tuple, indices))) > 1 and all(len(set(each)) == 4 for each in indices), indices


def test_the_memory_of_batches_that_a_collator_made_is_used_again() -> None:
    with loading(NumberDicts(), collate_fn=stack_dicts) as loader:
        batches = iter(loader)
        kept = [next(batches) for _ in range(3)]
        before = [content(batch) for batch in kept]
        for _ in range(20):
            next(batches)
        # Clearing new memory took longer than collating, and so did batches with a collate_fn.
        assert 4 <= len(loader._slot_list.slots) <= 5
        assert [content(batch) for batch in kept] == before


@pytest.mark.parametrize("name", [1, None, ("x", "y")])
def test_a_name_of_a_field_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(DataPipelineError, match="names must be texts"):
        batch_of([{name: np.zeros(2)}] * 8)


def as_tensor(array: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(array)


@pytest.mark.parametrize("batch", [2, 3, 5])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "value_of",
    [
        lambda array, index: array,
        lambda array, index: {"y": array, "index": np.array(index)},
        lambda array, index: [{"y": (array, np.array(index))}],
        lambda array, index: as_tensor(array),
    ],
    ids=["array", "nested", "nested in a list", "tensor of torch"],
)
def test_samples_that_begin_to_overwrite_each_other_later_are_refused(
    batch: int, is_stream: bool, value_of: Any
) -> None:
    buffer = np.zeros(2)

    def sample(index: int) -> dict[str, Any]:
        if index < 20:
            return {"x": value_of(np.full(2, float(index)), index)}
        buffer[:] = index
        return {"x": value_of(buffer, index)}

    if is_stream:
        loader: Any = from_iterable(lambda: map(sample, range(60)), batch)
    else:
        loader = DataLoader(OfAnyForm(sample, 60), batch_size=batch, collate_fn=default_collate)
    with pytest.raises(DataPipelineError, match=r"field 'x' of a sample of .* overwrites .* return a copy"):
        list(loader.numpy())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_collator_may_get_sparse_tensors_of_torch(is_stream: bool) -> None:
    torch: Any = pytest.importorskip("torch")
    samples = [{"x": torch.eye(2).to_sparse()}] * 4

    def dense(samples: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([sample["x"].to_dense() for sample in samples])}

    source: Any = (lambda: iter(samples)) if is_stream else samples
    for batch in from_iterable(source, 2, collate_fn=dense).numpy():
        assert batch["x"].tolist() == [[[1, 0], [0, 1]]] * 2


@pytest.mark.parametrize("reused", [{}, []], ids=["dict", "list"])
def test_a_nested_dict_or_list_that_a_dataset_begins_to_use_again_is_found(reused: Any) -> None:
    def sample(index: int) -> dict[str, Any]:
        value: Any = type(reused)() if index < 60 else reused
        if isinstance(value, dict):
            value["y"] = np.full(2, index)
        else:
            value[:] = [index, index]
        return {"x": value}

    with pytest.raises(DataPipelineError, match=r"field 'x' of a sample of .* overwrites .* return a copy"):
        list(DataLoader(OfAnyForm(sample, 120), batch_size=4, collate_fn=default_collate).numpy())


def test_samples_that_share_memory_which_does_not_change_are_delivered() -> None:
    shared = np.arange(3)
    dataset = OfAnyForm(lambda index: {"x": np.full(2, index), "mask": shared})
    samples = [{"x": np.full(2, index), "mask": shared} for index in range(40)]
    for loader in (DataLoader(dataset, batch_size=2, collate_fn=stack_dicts), from_iterable(lambda: iter(samples), 2)):
        assert all((batch["mask"] == shared).all() for batch in loader.numpy())


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">i8"])
def test_arrays_in_another_order_of_bytes_become_tensors(dtype: str) -> None:
    rows = [np.array([index, 5]).astype(dtype if index % 2 else dtype.replace(">", "<")) for index in range(4)]
    dataset = [{"x": row} for row in rows]
    for collate_fn in (None, lambda samples: {"x": np.array([each["x"] for each in samples], dtype)}):
        found = [batch["x"] for batch in DataLoader(dataset, 2, collate_fn=collate_fn).numpy()]
        assert np.concatenate(found).tolist() == np.stack(rows).tolist()
    placed = to_global(Instance(x=DistTensorData(np.stack(rows))))["x"]
    assert placed.numpy().tolist() == np.stack(rows).tolist()


class RefusesToBeAnArray:
    def __array__(self, dtype: Any = None) -> np.ndarray:
        raise OverflowError("no array")


@pytest.mark.parametrize("first", [{"x": 1}, (1,)])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "worker_type": "thread"}])
def test_an_item_that_is_none_or_no_array_is_named(first: Any, options: dict[str, Any]) -> None:
    bad = {"x": RefusesToBeAnArray()} if isinstance(first, dict) else (RefusesToBeAnArray(),)
    fields = None if isinstance(first, dict) else ["x"]
    for odd, problem in ((None, r"(the item is None|got NoneType)"), (bad, "OverflowError: no array")):
        for place in (0, 2):
            items = [first] * 3
            items[place] = odd
            with (
                pytest.raises(DataPipelineError, match=rf"sample {place} of list.*{problem}"),
                loading(items, fields=fields, **options) as loader,
            ):
                next(iter(loader))
    with pytest.raises(DataPipelineError, match="sample 1 of list: the item is None"):
        next(iter(DataLoader([(1,), None], 2, fields=["x"], collate_fn=stack_dicts)))


def test_names_of_what_a_collator_returns_are_not_fields_of_samples() -> None:
    def collate(samples: list[Any]) -> Any:
        return {"x": np.array([len(sample) for sample in samples]), "y": np.ones(len(samples))}

    with pytest.raises(SchemaError, match=r"2 name\(s\).*1 value.*leave out fields, and return a dict"):
        next(iter(DataLoader(["a", "bc"], 2, collate_fn=collate, fields=["x", "y"])))
    assert next(iter(DataLoader(["a", "bc"], 2, collate_fn=collate).numpy()))["x"].tolist() == [1, 2]


@pytest.mark.parametrize("lists", [[[], [1, 2], [3]], [[1, 2], [], []]])
def test_an_empty_list_is_padded_as_the_lists_beside_it(lists: list[list[int]]) -> None:
    samples = [{"tokens": tokens} for tokens in lists]
    batch = next(iter(DataLoader(samples, 3, collate_fn=PadCollator({"tokens": {"value": -1}})).numpy()))
    assert batch["tokens"].dtype == np.int64
    assert batch["tokens"].tolist() == [(tokens + [-1, -1])[:2] for tokens in lists]


def test_texts_of_numpy_are_texts() -> None:
    samples = [{"x": 1, "name": np.str_("a")}, {"x": 2, "name": "b"}]
    for loader in (DataLoader(samples, 2), from_iterable(lambda: iter(samples), 2)):
        assert next(iter(loader))["name"] == ["a", "b"]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("u1", -1), ("u1", 256), ("i8", 0.5), ("i8", math.nan), ("f2", 1e6), ("f4", 2**200), ("?", 2), ("i8", 2**70)],
)
def test_a_padding_that_a_dtype_cannot_hold_is_refused(dtype: str, value: Any) -> None:
    with pytest.raises(SchemaError, match=rf"field 'x' is padded with .*, which its dtype {np.dtype(dtype)} cannot"):
        PadCollator({"x": {"value": value}})([{"x": np.zeros(1, dtype)}, {"x": np.zeros(2, dtype)}])


@pytest.mark.parametrize(
    ("dtype", "value"), [("u1", 255), ("i8", 1.0), ("f4", 0.1), ("f2", math.nan), ("f4", -math.inf), ("?", 1)]
)
def test_a_padding_may_be_any_value_of_its_dtype(dtype: str, value: Any) -> None:
    batch = PadCollator({"x": {"value": value}})([{"x": np.zeros(1, dtype)}, {"x": np.zeros(2, dtype)}])
    assert np.array_equal(batch["x"][0, 1], np.dtype(dtype).type(value), equal_nan=dtype[0] == "f")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(
            ({"x": argument}, f"padding of 'x': {next(iter(argument))} is")
            for argument in ({"value": "x"}, {"multiple": 2.0}, {"max_length": "4"}, {"fixed": 1}, {"side": "up"})
        ),
        ({"x": -1}, "padding of 'x' is -1; it must be a Padding"),
        (["x"], r"fields is \['x'\]"),
    ],
)
def test_what_is_no_padding_is_named(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PadCollator(wrong)


@dataclass
class Point:
    place: Any
    number: Any = 7


@dataclass
class Line:
    ends: list[Point]
    name: str


@pytest.mark.parametrize("workers", WORKERS[:2], ids=WORKER_NAMES[:2])
@pytest.mark.parametrize("collate_fn", [None, default_collate])
def test_dataclasses_within_samples_become_dicts(workers: dict[str, Any], collate_fn: Any) -> None:
    samples = [{"line": Line([Point(np.ones(2)), Point(np.full(2, row))], f"line {row}")} for row in range(4)]
    batch = next(iter(DataLoader(samples, 3, collate_fn=collate_fn, **workers).numpy()))
    first, last = batch["line"]["ends"]
    assert batch["line"]["name"] == ["line 0", "line 1", "line 2"]
    assert last["place"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert first["number"].tolist() == [7, 7, 7]
    numbers = DataLoader([{"point": Point(np.ones(2), row)} for row in range(4)], 4, collate_fn=collate_fn, **workers)
    assert next(iter(numbers.numpy()))["point"]["number"].tolist() == [0, 1, 2, 3]


# A worker imports PyTorch.
@pytest.mark.parametrize(
    ("kind", "read"),
    [*product((tuple, Pair, dict), ("samples", "batches"))]
    + [slowly(kind, "by workers") for kind in (tuple, Pair, dict)],
)
def test_the_strings_of_pytorchs_collation_are_texts(kind: Any, read: str) -> None:
    torch: Any = pytest.importorskip("torch")

    def sample(index: int) -> Any:
        if kind is dict:
            return {"x": index, "of": {"names": ("a", f"no {index}")}, "text": f"{index}"}
        return (index, f"no {index}") if kind is tuple else Pair(index, f"no {index}")

    dataset, collate_fn = OfAnyForm(sample, 6), torch.utils.data.dataloader.default_collate
    theirs = torch.utils.data.DataLoader(dataset, 4)
    loader = (
        from_iterable(theirs)
        if read == "batches"
        else DataLoader(dataset, 4, collate_fn=collate_fn, num_workers=int(read != "samples"))
    )
    for batch, expected in zip(loader.numpy(), theirs):
        if kind is dict:
            assert batch["of"]["names"] == [list(texts) for texts in expected["of"]["names"]]
            assert batch["text"] == expected["text"]
        else:
            numbers, texts = batch
            assert (numbers.tolist(), texts) == (expected[0].tolist(), list(expected[1]))


class OfPydantic:
    model_fields = ("x",)


class OfPandas:
    def to_dict(self) -> dict[str, Any]:
        return {}


class OfAttrs:
    __attrs_attrs__ = ("x",)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("item", "remedy"),
    [(OfPydantic(), r"dict\(item\)"), (OfAttrs(), r"attrs.asdict\(item"), (OfPandas(), r"item.to_dict\(\)")],
)
def test_objects_of_other_classes_are_refused_with_what_makes_dicts_of_them(
    item: Any, remedy: str, nested: bool
) -> None:
    samples = [{"x": item}, {"x": item}] if nested else [item, item]
    with pytest.raises(SchemaError, match=f"{type(item).__name__}.*return {remedy}"):
        next(iter(DataLoader(samples, 2)))


@pytest.mark.parametrize("collate_fn", [None, default_collate])
def test_tensors_with_a_gradient_are_read_without_it(collate_fn: Any) -> None:
    torch: Any = pytest.importorskip("torch")
    weights = torch.nn.Parameter(torch.arange(3.0))
    for sample in ({"x": weights, "y": 1}, {"x": {"inner": weights * 1}, "y": 1}, (weights, 1), Instance(x=weights)):
        for batch in DataLoader([sample] * 2, 2, collate_fn=collate_fn).numpy():
            (found,) = {path: each for path, each in contents_of(batch).items() if path[0] in ("x", "0")}.values()
            assert found == np.arange(3, dtype=np.float32).tobytes() * 2
    with pytest.raises(SchemaError, match=r"field 'x' .*BFloat16.*value.float\(\)"):
        next(iter(DataLoader([{"x": torch.ones(2, dtype=torch.bfloat16)}] * 2, 2)))


def test_a_batch_that_mixes_str_and_bytes_is_refused_instead_of_made_one_kind() -> None:
    made = DataLoader([{"x": 0}, {"x": 1}], 2, collate_fn=lambda samples: {"t": ["a", b"b"]})
    with pytest.raises(SampleError, match=r"field 't\.0' is 'a', which is not a tensor"):
        next(iter(made.numpy()))
