"""Samples and batches of any form, as named fields of numpy arrays."""

from __future__ import annotations

from collections import abc, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from libai_data.data.nesting import (
    TEXT,
    TupleFields,
    fields_of_dataclass,
    is_dataclass,
    is_named_tuple,
    is_numbers,
    is_texts,
    taken_apart,
)
from libai_data.errors import SchemaError, nearest
from libai_data.mesh.arrays import as_array, as_dict, is_flow_tensor
from libai_data.structures import DistTensorData, Instance, fields_of


class ArgumentNames(tuple[str, ...]):
    """Names of a model's arguments, for the values of tuples. An item with names of its own keeps its names.

    Attributes:
        given_to: the type of the item that got these names last; None if all items had names of their own.
    """

    given_to: type | None = None


def named(item: Any, names: Sequence[str] | None = None) -> dict[str, Any]:
    """The fields of a sample or batch, by name, as they are; of a tuple, named or not, as `TupleFields`.

    Args:
        item: an Instance, mapping, named tuple or dataclass; or a tuple, list or single tensor to which `names` gives
            names. Keys that begin with "__", which tools use for notes of their own, are left out.
        names: of the values of a tuple, by default "0", "1", ...; for an item that has names, the fields to use.

    Raises:
        SchemaError: The item has no fields, or other fields than `names`.
    """
    fields = fields_in(item)
    if fields is None:
        return _given_names(item, names)
    kind = TupleFields if _is_tuple(item) else dict
    if names is None or isinstance(names, ArgumentNames):
        # By `fields[name]`, because a dict may decode its values in `__getitem__`, which `items` does not call.
        used = {name: fields[name] for name in [*fields.keys()] if not str(name).startswith("__")}
        for name in used:
            if not isinstance(name, str):
                raise SchemaError(
                    f"the name of a field of the item is {name!r}, a {type(name).__name__}; names must be texts, the "
                    "arguments of model.forward"
                )
        if not used:
            raise SchemaError(
                f"the item is without a field: {list(fields)} (names that begin with '__' do not count); each sample "
                "needs at least one field"
            )
        return kind(used)
    for name in names:
        if name not in fields:
            raise SchemaError(f"fields has '{name}', but the item has {list(fields)}.{nearest(name, fields)}")
    return kind((name, fields[name]) for name in names)


def _is_tuple(item: Any) -> bool:
    return isinstance(item, (tuple, TupleFields)) or (isinstance(item, Instance) and item._is_tuple)


def fields_in(item: Any) -> Mapping[str, Any] | None:
    """The fields of an item that has names for them; None for any other item."""
    if isinstance(item, Instance):
        return item.get_fields()
    if isinstance(item, abc.Mapping):
        return item
    if is_named_tuple(item):
        return item._asdict()
    if is_dataclass(item):
        return fields_of_dataclass(item)
    return fields_of(item) if callable(getattr(item, "get_fields", None)) else None  # LiBai's Instance


def leaves_of(sample: Any) -> dict[str, Any]:
    """The leaves of a sample of any form, by path, as they are; the path of a sample without names is ""."""
    leaves: dict[str, Any] = {}
    taken_apart(fields_in(sample) or {"": sample}, leaves)
    return leaves


def ends_of(array: np.ndarray) -> list[np.ndarray]:
    """The first and the last bytes of each row, up to 8, as views of unsigned integers [rows]: one view if the row has
    no more bytes, and none if the rows are empty or not contiguous."""
    if not array.size or not array.flags.c_contiguous:
        return []
    content = array.reshape(len(array), -1).view(np.uint8)
    size = content.shape[1]
    width = 1 << min(3, size.bit_length() - 1)
    begins = sorted({0, size - width})
    return [content[:, begin : begin + width].view(f"u{width}")[:, 0] for begin in begins]


def _given_names(item: Any, names: Sequence[str] | None) -> dict[str, Any]:
    if item is None:
        raise SchemaError("the item is None; return a dict of fields (is a `return` missing, or did a filter drop it?)")
    is_single = is_numbers(item) and (names is None or len(names) == 1)
    several = isinstance(item, (tuple, list)) and not is_single
    values = list(item) if several else [item]
    if isinstance(names, ArgumentNames):
        names.given_to = type(item)
        names = names[: len(values)]
    if names is None and not several:
        remedy = "name it after an argument of model.forward, with fields=['...']"
        if as_dict(item):
            remedy = f"return {as_dict(item)}"
        raise SchemaError(f"the item is of type {type(item).__name__}, without a name; {remedy}")
    names = [str(number) for number in range(len(values))] if names is None else names
    if len(values) != len(names):
        raise SchemaError(f"fields has {len(names)} name(s) {list(names)} for {len(values)} value(s)")
    return TupleFields(zip(names, values)) if several else dict(zip(names, values))


def selected(sample: Any, names: Sequence[str]) -> Any:
    """A sample with only the fields of these names, in their order, for a collator: a dict for a mapping, an Instance
    for an Instance, a named tuple for all others. `names` are given to the values of a tuple or list. A SchemaError if
    the sample has other names, or another number of values."""
    fields = named(sample, names)
    if isinstance(sample, Instance):
        return Instance(**fields)
    return fields if isinstance(sample, abc.Mapping) else _tuple_of(tuple(names))(*fields.values())


@lru_cache(maxsize=16)
def _tuple_of(names: tuple[str, ...]) -> Any:
    return namedtuple("Sample", names)


_TIMES_COMPARED = 8
_COMPARED_WITH_FIRST = 8
"""More than the number of buffers that a dataset uses in turn."""
_EVERY = 8
_DEPTH = 8
_MOST_PARTS = 1 << 14
_MOST_PLACES = 16
_PLAIN = (bool, int, float, str, bytes, type(None))
_LEAVES = (np.ndarray, np.generic, int, float, *TEXT)
_MUTABLE = (dict, list, Instance)
_Path = tuple[Any, ...]


def contents_of(sample: Any) -> dict[_Path, bytes]:
    """The current content of each leaf of a sample, by `_parts_of`; only of leaves with numbers or text."""
    contents = {path: _content(value) for path, value in _parts_of(sample)}
    return {path: content for path, content in contents.items() if content}


def field_of(path: _Path) -> Any:
    """The name or number of the field that a path of `contents_of` is in; 0 for a sample that is a single value."""
    return path[0] if path else 0


def _parts_of(sample: Any) -> Iterator[tuple[_Path, Any]]:
    """The sample, its fields, and what is nested in them, each with its path: names and numbers from the field on."""
    return islice(_within(sample, (), _DEPTH), _MOST_PARTS)  # A list may contain itself.


def _within(value: Any, path: _Path, depth: int) -> Iterator[tuple[_Path, Any]]:
    yield path, value
    if depth and not isinstance(value, _LEAVES) and not is_numbers(value):
        parts = _values_in(value)
        if parts.get(0) is not value:
            for name in parts:
                yield from _within(parts[name], (*path, name), depth - 1)


def _values_in(sample: Any) -> Mapping[Any, Any]:
    fields = fields_in(sample)
    if fields is not None:
        return fields
    return dict(enumerate(sample)) if isinstance(sample, (tuple, list)) else {0: sample}


def _content(value: Any) -> bytes:
    tensor = array_in(value)
    if is_flow_tensor(tensor) or hasattr(tensor, "__array__"):
        with suppress(SchemaError):  # Only a collator can use this value.
            return as_array(tensor).tobytes()
    if isinstance(value, (int, float, *TEXT)) or is_numbers(value):
        return repr(value).encode(errors="surrogatepass")
    return b""


def check_kept(sample: Any, before: Mapping[_Path, bytes], newest: Any, dataset: str) -> None:
    """Refuse a dataset whose newer sample has overwritten an array of an earlier one."""
    now = contents_of(sample)
    changed = [path for path in now if now[path] != before.get(path)]
    in_newest = contents_of(newest) if changed else {}
    for path in changed:
        if now[path] == in_newest.get(path):
            name = field_of(path)
            raise SchemaError(
                f"field {name!r} of a sample of {dataset} overwrites that of an earlier one; return a copy of it"
            )


class ReuseCheck:
    """Refuses samples that overwrite the memory of earlier samples which are still in use, at any place of a stream.

    If two samples in use share memory, either this memory is constant, or one sample overwrites the other. So the check
    then compares the contents before and after the next sample: the first times, and then less and less often. The
    first samples are also compared with the very first one, for datasets that use several buffers in turn. Of many
    samples in use, not each one is looked at, because that would take longer than to read some samples.
    """

    def __init__(self, dataset: str) -> None:
        self._dataset = dataset
        self._times = self._begun = 0
        self._suspects = True
        self.begin()

    def begin(self) -> None:
        """Forget the samples so far, which are no longer in use."""
        self._last: Any = None  # Kept alive, so that no new sample gets its memory by chance.
        self._places: dict[_Path, int] = {}
        self._contents: dict[_Path, bytes] | None = None
        self._first: Any = None
        self._of_first: dict[_Path, bytes] = {}
        self._begun += 1
        self._seen = 0
        self._left = _COMPARED_WITH_FIRST if self._begun <= _TIMES_COMPARED else 0

    def see(self, sample: Any) -> None:
        """Check the next sample; a SchemaError that names the field if it has overwritten an earlier sample."""
        self._seen += 1
        if self._seen > 2 and self._seen % _EVERY and not self._left and self._contents is None:
            return
        if self._left:
            self._left -= 1
            if self._of_first:
                check_kept(self._first, self._of_first, sample, self._dataset)
            else:
                self._first, self._of_first = sample, contents_of(sample)
        else:
            self._first = None
        if self._contents is not None:
            check_kept(self._last, self._contents, sample, self._dataset)
            self._contents, self._suspects = None, False
        places = _places_of(sample)
        shares = any(self._places.get(path) == place for path, place in places.items())
        self._suspects |= shares
        if shares or (self._suspects and self._last is None):
            self._times += 1
            if self._times <= _TIMES_COMPARED or self._times & (self._times - 1) == 0:
                self._contents = contents_of(sample)
        self._last, self._places = sample, places


def first_in_one_place(samples: Sequence[Any], indices: Sequence[int]) -> int | None:
    """The number of the first sample that shares memory with a sample of another index, or None; all are in use."""
    owners: dict[tuple[_Path, int], int] = {}
    for row, sample in enumerate(samples):
        for place in _places_of(sample).items():
            owner = owners.setdefault(place, row)
            if indices[owner] != indices[row]:
                return owner
    return None


def _places_of(sample: Any) -> dict[_Path, int]:
    """The addresses of a sample's arrays and tensors, and of the sample and its parts that are mutable; at most
    `_MOST_PLACES` of them are of nested values."""
    places: dict[_Path, int] = {(): id(sample)} if isinstance(sample, _MUTABLE) else {}
    _note_places(sample, (), places)
    return places


def _note_places(value: Any, path: _Path, places: dict[_Path, int]) -> None:
    is_nested = path and type(value) in (list, tuple)
    for name, part in enumerate(value[:_MOST_PLACES]) if is_nested else _values_in(value).items():
        if type(part) in _PLAIN or (path and len(places) >= _MOST_PLACES):
            continue
        tensor, place = part if type(part) is np.ndarray else array_in(part), (*path, name)
        if isinstance(tensor, np.ndarray):
            if tensor.size:
                places[place] = tensor.__array_interface__["data"][0]
        elif hasattr(type(tensor), "data_ptr"):  # of PyTorch
            with suppress(RuntimeError):  # A sparse tensor has no address.
                if tensor.numel():
                    places[place] = tensor.data_ptr()
        elif part is not value:
            if isinstance(part, _MUTABLE):
                places[place] = id(part)
            if len(path) < _DEPTH and not (isinstance(part, list) and (not part or type(part[0]) in _PLAIN)):
                _note_places(part, place, places)


def as_leaf(value: Any, path: str) -> Any:
    """Convert a leaf to a numpy array, without a copy if its data is in the memory of this machine.

    Args:
        value: numpy, OneFlow or torch tensor, anything with `__array__` or DLPack, number, list of numbers; a
            `DistTensorData` stays one, with its layout. Anything else is a SchemaError, which names `path`.
    """
    if isinstance(value, DistTensorData):
        return value.with_tensor(as_leaf(value.tensor, path))
    if isinstance(value, (np.ndarray, np.generic)) or is_flow_tensor(value):
        return as_array(value, path)
    if value is None or isinstance(value, TEXT):
        raise SchemaError(
            f"field '{path}' is {value!r:.40}, which is not a tensor; select the other fields with fields=[...]"
        )
    try:
        if hasattr(value, "as_array"):  # DALI's lists of tensors
            return np.asarray(value.as_array())
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            return np.from_dlpack(value)
        return as_array(value, path)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        if isinstance(error, SchemaError):
            raise
        raise SchemaError(f"field '{path}' ({type(value).__name__}) cannot become an array: {error}") from error


def leaves_of_batch(fields: Mapping[str, Any], leaves: dict[str, Any]) -> dict[str, Any]:
    """Take the fields of a batch apart; returns the skeleton. `leaves` gets path -> array or `DistTensorData` [rows,
    ...], or list of strings."""
    skeleton = taken_apart({name: _texts_in_lists(value) for name, value in fields.items()}, leaves)
    if isinstance(fields, TupleFields):
        skeleton = TupleFields(skeleton)
    for path, value in leaves.items():
        if not isinstance(value, list) or is_numbers(value):
            leaves[path] = as_leaf(value, path)
    return skeleton


def _texts_in_lists(value: Any) -> Any:
    """A value of a batch, with lists of strings instead of the tuples of strings that PyTorch's collation makes."""
    if isinstance(value, abc.Mapping):
        return {key: _texts_in_lists(item) for key, item in value.items()}
    if not isinstance(value, (list, tuple)) or is_numbers(value) or is_texts(value):
        return value
    if type(value) is tuple and is_texts([*value]):
        return [*value]
    parts = [*map(_texts_in_lists, value)]
    return value._make(parts) if is_named_tuple(value) else parts if isinstance(value, list) else tuple(parts)  # type: ignore[union-attr]


def array_in(value: Any) -> Any:
    """The array of a leaf with or without a layout."""
    return value.tensor if isinstance(value, DistTensorData) else value


def laid_out_like(array: np.ndarray, like: Any) -> DistTensorData:
    """A leaf with the layout of another one, if that has a layout."""
    return like.with_tensor(array) if isinstance(like, DistTensorData) else DistTensorData(array)


def rows_in(leaves: Mapping[str, Any]) -> int:
    """The number of rows of a batch; a SchemaError if its fields have different numbers of rows."""
    counts: dict[str, int] = {}
    for path, value in leaves.items():
        array = array_in(value)
        if not isinstance(array, list) and not array.ndim:
            raise SchemaError(f"field '{path}' of the batch is a single number; each row needs one")
        counts[path] = len(array)
    if len(set(counts.values())) != 1:
        raise SchemaError(f"the fields of a batch differ in their number of rows: {counts}")
    return next(iter(counts.values()))
