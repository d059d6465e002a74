"""Samples and batches: an `Instance` maps field names to tensors, a `DistTensorData` is a tensor with its layout."""

from __future__ import annotations

import copy
from collections.abc import Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Callable, Union

import numpy as np

from libai_data.errors import SchemaError, nearest
from libai_data.mesh.arrays import as_array, as_flow_tensor, first_leaf, is_flow_tensor, stack_tensors
from libai_data.mesh.current import get_layer_placement
from libai_data.mesh.global_tensor import local_to_global, nd_sbp
from libai_data.structures.origin import BatchInfo, Origin

DEFAULT_SBP = ("split_0", "broadcast")


@dataclass(init=False)
class DistTensorData:
    """A tensor of one field, and its layout on the mesh.

    Args:
        tensor: numpy array or OneFlow tensor; numbers and lists of numbers become arrays. In a batch, dim 0 is the
            batch dim; the tensor of a sample has no batch dim.
        sbp_list: signature over the (data, tensor) axes of the mesh, each "split_<dim>" or "broadcast"; dim 0 is the
            batch dim.
        placement_idx: the layer whose pipeline stage has the tensor; 0 is the first, -1 the last.
    """

    tensor: Any
    sbp_list: list[str]
    placement_idx: int
    # Set for batches of a loader; see `local_to_global`. A class attribute, because millions of samples are made.
    _is_part: bool = field(default=False, repr=False, compare=False)

    # Written by hand: the `__init__` of a dataclass takes twice as long, and each field of each sample calls it.
    def __init__(self, tensor: Any, sbp_list: Sequence[str] = DEFAULT_SBP, placement_idx: int = 0) -> None:
        # Not subclasses of arrays: they may have a mask, or always two dims, as np.matrix has.
        is_tensor = type(tensor) is np.ndarray or is_flow_tensor(tensor)
        self.tensor = tensor if is_tensor else as_array(tensor)
        self.sbp_list = sbp_list if isinstance(sbp_list, str) else [*sbp_list]  # type: ignore[assignment]
        self.placement_idx = placement_idx

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self.tensor.shape)

    def with_tensor(self, tensor: Any) -> DistTensorData:
        """Another tensor in the place of this one, with the same layout."""
        other = DistTensorData(tensor, self.sbp_list, self.placement_idx)
        other._is_part = self._is_part
        return other

    def to_global(self, sbp: Any = None, placement: Any = None, device_type: str | None = None) -> None:
        """Replace `tensor` by its global tensor.

        Each rank has its own data-parallel shard. Ranks that differ only in the tensor or pipeline coordinate have
        equal shards. If the data axis is split over dim 0, nothing is sent.

        Args:
            sbp: a OneFlow sbp (list) that overrides `sbp_list`.
            placement: a OneFlow placement that overrides `placement_idx`.
            device_type: "cpu" or "cuda"; by default the mesh's.

        Raises:
            SchemaError: The layout does not fit the tensor or the mesh.
        """
        if sbp is None and placement is None:
            self.tensor = local_to_global(self.tensor, self.sbp_list, self.placement_idx, device_type, self._is_part)
        else:
            sbp = nd_sbp(self.sbp_list) if sbp is None else sbp
            placement = get_layer_placement(self.placement_idx, device_type) if placement is None else placement
            self.tensor = as_flow_tensor(self.tensor).to_global(sbp=sbp, placement=placement)

    @staticmethod
    def stack(values: Sequence[DistTensorData]) -> DistTensorData:
        """Stack samples' tensors along a new batch dim 0.

        Raises:
            SchemaError: `values` is empty, or shapes, dtypes or layouts differ.
        """
        if not values:
            raise SchemaError("nothing to stack: the list of samples is empty")
        first = values[0]
        for row, value in enumerate(values):
            if value.sbp_list != first.sbp_list or value.placement_idx != first.placement_idx:
                raise SchemaError(
                    f"layouts differ between samples of a batch: sample 0 has {first.sbp_list} on layer "
                    f"{first.placement_idx}, sample {row} has {value.sbp_list} on layer {value.placement_idx}"
                )
        return DistTensorData(
            stack_tensors([value.tensor for value in values]), list(first.sbp_list), first.placement_idx
        )


class _UnlessAField:
    """A method that is hidden by a field of the same name: models may have an argument named `values`."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method, self._name, self.__doc__ = method, method.__name__, method.__doc__

    def __get__(self, instance: Instance | None, owner: type) -> Any:
        if instance is None:
            return self._method
        fields = instance.get_fields()
        return fields[self._name] if self._name in fields else MethodType(self._method, instance)


class Instance:
    """Named fields of one sample or one batch; the names are the argument names of `model.forward`.

    Fields are set by keyword, attribute or `set`; names that start with "_" are private to the pipeline.

    An Instance also works like a dict: ``batch["x"]``, ``"x" in batch``, ``len``, iteration over the names, `keys`,
    `values`, `items`, `pop`, `update`, `copy`, ``dict(batch)`` and ``model(**batch)``. These return the
    tensor of a `DistTensorData`, without its layout. ``batch["x"] = tensor`` keeps the layout of the field. `get` and
    attributes return fields as they were set.

    A batch of tuples (or NamedTuples) can also be read like a tuple: ``x, y = batch``, ``batch[0]``, ``batch[:2]``,
    ``model(*batch)``. Iterating over such a batch gives the values instead of the names.
    """

    # Set for batches only. Class attributes, because millions of samples are made.
    _origin: Origin | None = None
    _unnamed: type | None = None
    """If the values had no names at first: the type of the original batch, a tuple, a list or a tensor."""
    _is_tuple: bool = False
    """Whether the samples are tuples or named tuples, so that the batch unpacks into values."""

    def __init__(self, /, **fields: Any) -> None:
        self.__dict__["_fields"] = fields

    def __copy__(self) -> Instance:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__, _fields=dict(self._fields))
        return other

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self.set(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._fields:
            known = [] if name.startswith("_") else list(self._fields)
            raise AttributeError(f"no field '{name}'; there are {known}.{nearest(name, known)}")
        return self._fields[name]

    def attach(self, origin: Origin) -> None:
        """Make this a batch of a loader, with the information of the loader."""
        self._origin = origin

    def set(self, name: str, value: Any) -> None:
        """Set field `name`."""
        self._fields[name] = value

    def get(self, name: str, *default: Any) -> Any:
        """Return field `name` as it was set, or the default if there is no such field.

        Raises:
            KeyError: There is no such field, and no default.
        """
        if name not in self._fields:
            if default:
                return default[0]
            raise KeyError(f"no field '{name}'; there are {list(self._fields)}.{nearest(name, self._fields)}")
        return self._fields[name]

    def has(self, name: str) -> bool:
        """Whether there is a field `name`."""
        return name in self._fields

    def remove(self, name: str) -> None:
        """Delete field `name`."""
        self.get(name)
        del self._fields[name]

    def get_fields(self) -> dict[str, Any]:
        """The fields themselves, in the order in which they were set."""
        return self._fields

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, name: str | int | slice) -> Any:
        if self._is_tuple and isinstance(name, slice):
            return tuple(self)[name]
        return _without_layout(self.get(self._name_of(name)))

    def __setitem__(self, place: str | int, value: Any) -> None:
        name = self._name_of(place)
        old = self._fields.get(name)
        if isinstance(old, DistTensorData) and not isinstance(value, DistTensorData):
            try:
                value = old.with_tensor(value)
            except SchemaError as error:
                raise SchemaError(f"field '{name}': {error}") from error
        self.set(name, value)

    def __delitem__(self, name: str | int) -> None:
        self.remove(self._name_of(name))

    def _name_of(self, place: Any) -> Any:
        """The name of the field at a place of a batch of tuples; a name as it is."""
        return [*self._fields][place] if self._is_tuple and isinstance(place, (int, np.integer)) else place

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[Any]:
        return (self[name] for name in self._fields) if self._is_tuple else iter(self._fields)

    def keys(self) -> KeysView[str]:
        """Names of the fields."""
        return self._fields.keys()

    @_UnlessAField
    def values(self) -> list[Any]:
        """Values of the fields, without their layouts."""
        return [self[name] for name in self._fields]

    @_UnlessAField
    def items(self) -> list[tuple[str, Any]]:
        """Names and values of the fields, without their layouts."""
        return [(name, self[name]) for name in self._fields]

    @_UnlessAField
    def pop(self, name: str, *default: Any) -> Any:
        """Delete field `name`, and return its value without its layout, or the default if there is no such field."""
        if name not in self._fields and default:
            return default[0]
        value = self[name]
        del self[name]
        return value

    @_UnlessAField
    def update(self, fields: Any = (), /, **named: Any) -> None:
        """Set fields as ``batch[name] = value`` does, from a mapping, Instance or pairs, and by keyword."""
        given = fields.get_fields() if isinstance(fields, Instance) else fields
        for name, value in dict(given, **named).items():
            self[name] = value

    @_UnlessAField
    def copy(self) -> Instance:
        """The same fields in another Instance."""
        return copy.copy(self)

    def __repr__(self) -> str:
        return f"Instance({', '.join(f'{name}={value!r}' for name, value in self._fields.items())})"

    @staticmethod
    def stack(instances: Sequence[Instance]) -> Instance:
        """Stack samples into a batch, field by field along a new dim 0.

        Values may be `DistTensorData`, numpy arrays, OneFlow tensors, numbers, lists of numbers, or instances of a
        class that has `stack`. Lists of other values stay lists, with one entry per sample.

        Raises:
            SchemaError: The samples' fields, shapes, dtypes or layouts differ; the message names field and sample.
        """
        if not instances:
            raise SchemaError("nothing to stack: the list of samples is empty")
        names = list(instances[0].get_fields())
        for row, instance in enumerate(instances):
            check_field_names(list(instance.get_fields()), names, f"sample {row} of a batch")
        batch = Instance()
        for name in names:
            try:
                batch.set(name, _stack_values([instance.get(name) for instance in instances]))
            except SchemaError as error:
                raise SchemaError(f"field '{name}': {error}") from error
        return batch


class NamedBatch(Instance):
    """A batch with named fields, as loaders yield it: an Instance that other libraries recognize as a `Mapping`.

    A batch of tuples is no NamedBatch, because iterating over it gives values. `get` is that of `Instance`.

    Args:
        fields: name -> value, for code that makes a new mapping of changed items by ``type(batch)({...})``.
        **named: fields by keyword.
    """

    def __init__(self, fields: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        super().__init__(**{**(fields or {}), **named})


Mapping.register(NamedBatch)


def batch_of(kind: type[Instance], fields: dict[str, Any], origin: Origin) -> Instance:
    """Make a batch of a loader, in a third of the time of `kind(**fields)` and `attach`."""
    made = kind.__new__(kind)
    made.__dict__.update(_fields=fields, _origin=origin)
    return made


def _without_layout(value: Any) -> Any:
    if isinstance(value, Instance):
        return value
    if isinstance(value, DistTensorData):
        return value.tensor
    if isinstance(value, Mapping):
        return {key: _without_layout(item) for key, item in value.items()}
    if isinstance(value, tuple):
        items = map(_without_layout, value)
        return value._make(items) if hasattr(value, "_fields") else tuple(items)  # type: ignore[attr-defined]
    return [*map(_without_layout, value)] if isinstance(value, list) else value


def _stack_values(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, (list, tuple)) and not _is_numeric(first_leaf(first)):
        return values
    if isinstance(first, (list, tuple)) or _is_numeric(first):
        return stack_tensors([_stackable(value, row) for row, value in enumerate(values)])
    for row, value in enumerate(values):
        if type(value) is not type(first):
            raise SchemaError(f"sample 0 has a {type(first).__name__}, sample {row} a {type(value).__name__}")
    if callable(getattr(type(first), "stack", None)):
        return type(first).stack(values)
    raise SchemaError(f"values of type {type(first).__name__} cannot be stacked; make them arrays")


def _is_numeric(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic, bool, int, float)) or is_flow_tensor(value)


def _stackable(value: Any, row: int) -> Any:
    try:
        return value if is_flow_tensor(value) else as_array(value)
    except SchemaError as error:
        raise SchemaError(f"sample {row} of the batch: {error}") from error


def check_field_names(found: Sequence[str], expected: Sequence[str], whose: str) -> None:
    """Raise an error if fields are missing or unexpected; the order does not matter.

    Raises:
        SchemaError: The names differ. The message has the missing and the unexpected fields.
    """
    if set(found) == set(expected):
        return
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    raise SchemaError(
        f"{whose} has other fields than the samples before it: missing {missing}, unexpected {extra}; "
        "every sample of a dataset must have the same fields"
    )


_NO_ORIGIN = Origin()


def origin_of(batch: Any) -> Origin:
    """The information that the loader attached to a batch; empty for a batch without a loader."""
    return (batch._origin if isinstance(batch, Instance) else None) or _NO_ORIGIN


def batch_info(batch: Any) -> BatchInfo | None:
    """The `BatchInfo` that the loader attached to a batch; None for any other, such as what `to_global` returns."""
    return origin_of(batch).info


Fields = Union[Instance, dict[str, Any]]


def _as_own(value: Any) -> Any:
    """Convert LiBai's `DistTensorData` to this package's; return anything else unchanged."""
    if isinstance(value, DistTensorData) or not (hasattr(value, "sbp_list") and hasattr(value, "placement_idx")):
        return value
    return DistTensorData(value.tensor, value.sbp_list, value.placement_idx)


def fields_of(sample: Fields) -> dict[str, Any]:
    """The fields of a sample or batch that is an `Instance` or a dict, or LiBai's `Instance`.

    Raises:
        SchemaError: `sample` is none of these.
    """
    if isinstance(sample, Instance):
        return sample.get_fields()
    if isinstance(sample, dict):
        return sample
    if callable(getattr(sample, "get_fields", None)):
        return {name: _as_own(value) for name, value in sample.get_fields().items()}
    raise SchemaError(
        f"a sample must be an Instance or a dict of named fields, got {type(sample).__name__}; "
        "name the fields after the arguments of model.forward"
    )
