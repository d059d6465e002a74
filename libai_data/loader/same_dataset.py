"""Compares a loader's dataset with that of a saved state, with that of other ranks, and with that of its workers."""

from __future__ import annotations

import sys
import time
import zlib
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from functools import cached_property
from itertools import zip_longest
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from libai_data.data.datasets.fingerprint import fingerprint_of, hash_of
from libai_data.data.files.identity import by_content, identity_within, key_of
from libai_data.data.items import leaves_of
from libai_data.data.nesting import TEXT, is_texts
from libai_data.data.random.global_generators import warn_once
from libai_data.data.samplers.cyclic import CyclicSampler
from libai_data.data.samplers.resuming import differences as stream_differences
from libai_data.data.samplers.resuming import refuse
from libai_data.data.samplers.single_round import SingleRoundSampler
from libai_data.data.samplers.stream_state import StreamState
from libai_data.errors import DataPipelineError
from libai_data.errors.argument_rules import MAPPING, or_none
from libai_data.errors.saved_state import Keys, check_state
from libai_data.loader.failures import ErrorPolicy
from libai_data.loader.reading import SampleReader
from libai_data.loader.schema import array_of


def fingerprint_with_samples(dataset: Any, samples: int = 0) -> dict[str, Any]:
    """The fingerprint of a dataset, a hash of `samples` spread samples, and of its files if digests identify them."""
    found = fingerprint_of(dataset)
    identity = by_content() and identity_within(dataset)
    if identity:
        found["files"] = key_of(identity)
    if samples:
        # Random transforms draw with seed 0, so that the hash does not depend on the loader's seed.
        reader = SampleReader(dataset, 0, ErrorPolicy("raise", None))
        indices = np.unique(np.linspace(0, len(dataset) - 1, samples).round().astype(np.int64))
        found["samples"] = hash_of(b"".join(_bytes_of(reader, int(index)) for index in indices))
    return found


def _bytes_of(reader: SampleReader, index: int) -> bytes:
    try:
        sample = reader.sample(0, index)
    except DataPipelineError as error:
        return type(error.__cause__ or error).__name__.encode()
    parts = []
    for path, leaf in leaves_of(sample).items():
        if isinstance(leaf, TEXT) or is_texts(leaf):
            parts.append(f"{path} {leaf!r}".encode(errors="surrogatepass"))
            continue
        array = np.ascontiguousarray(array_of(leaf, path))
        parts.append(f"{path} {array.dtype.str} {array.shape}".encode() + array.tobytes())
    return b"".join(parts)


def restore_stream(
    stream: Any, fingerprint: Mapping[str, Any], state: Mapping[str, Any], override: Collection[str]
) -> None:
    """Restore a loader's stream from a loader's state, or from a sampler's state, which has no dataset to compare."""
    check_state(state, Keys({}, {"dataset": or_none(MAPPING)}, others=True), "a loader")
    stream_state = {key: value for key, value in state.items() if key != "dataset"}
    found = dataset_difference(state.get("dataset") or {}, fingerprint)
    if isinstance(getattr(stream, "state", None), StreamState):
        # One error reports all differences.
        for name, words in stream_differences(stream_state, stream.state).items():
            found[name] = f"{found[name]}, {words}" if name in found else words
    refuse(found, override)
    stream.load_state_dict(stream_state, override)


def dataset_difference(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, str]:
    """{"dataset": the differences in words}, or {} without any; keys that only one of the two has are not compared."""
    words = [
        f"dataset's {key} was {saved[key]!r} and is now {own[key]!r}"
        for key in own
        if key in saved and saved[key] != own[key]
    ]
    return {"dataset": ", ".join(words)} if words else {}


def read_by_all(stream: Any, position: int) -> tuple[int, int] | None:
    """Epoch and index of the sample that all ranks read first, the first one of the global batch at `position`.

    None if not all ranks can read this sample. With lanes, a rank or node need not have the files of other ranks.
    """
    if not isinstance(stream, (CyclicSampler, SingleRoundSampler)) or stream.makes_outputs or stream.order.lanes > 1:
        return None
    batch = stream.serving((0,)).batch_at(position)
    return None if batch is None else (int(batch.epochs[0]), int(batch.indices[0]))


_MOST_OBJECTS = 256
_MOST_ITEMS = 1024
_MOST_BYTES = 1 << 20
_SAMPLES_BETWEEN_LOOKS, _SHARE_OF_LOOKS = 64, 0.002
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, bytearray, np.ndarray)


def attributes_of(*things: Any) -> list[Any]:
    """The attributes of datasets and functions, and of objects within them, with small contents; see `are_same`."""
    found: list[Any] = []
    seen: dict[int, Any] = {}
    waiting = list(things)
    while waiting and len(seen) < _MOST_OBJECTS:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, (type, FunctionType)):
            continue
        seen[id(thing)] = thing
        # Private attributes of this package's classes change while the dataset is read; workers do not need them.
        is_own = any(base.__module__.startswith("libai_data.") for base in type(thing).__mro__)
        for name, value in _parts_of(thing):
            is_container = isinstance(value, _CONTAINERS)
            is_private = is_own and str(name).startswith("_")
            if not is_own or (not is_private and (is_container or isinstance(value, _PLAIN))):
                found += [name, value]
            if _may_be_of_data(value, thing) and not (is_private and is_container):
                waiting.append(value)
    return found


def _may_be_of_data(value: Any, holder: Any) -> bool:
    """Whether a value within a dataset may decide its samples; a logger or a lock does not."""
    if isinstance(value, _CONTAINERS) or callable(value) or hasattr(type(value), "__getitem__"):
        return True
    packages = [type(each).__module__.partition(".")[0] for each in (value, holder)]
    return packages[0] == packages[1] or is_dataclass(value) or isinstance(value, (SimpleNamespace, Namespace))


def _parts_of(thing: Any) -> list[tuple[Any, Any]]:
    """Names and values of attributes, items of a small container, or a checksum of a small array."""
    if isinstance(thing, (np.ndarray, bytearray)):
        array = np.asarray(thing)
        is_small = array.nbytes <= _MOST_BYTES and not array.dtype.hasobject and not isinstance(thing, np.memmap)
        return [("", zlib.crc32(np.ascontiguousarray(array).tobytes()))] if is_small else []
    if isinstance(thing, _CONTAINERS):
        if len(thing) > _MOST_ITEMS:
            return [("", len(thing))]
        if isinstance(thing, (set, frozenset)):
            return [("", hash(frozenset(thing)))]
        return [*thing.items()] if isinstance(thing, dict) else [*enumerate(thing)]
    slots = [name for kind in type(thing).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    attributes = {name: getattr(thing, name) for name in slots if name[:2] != "__" and hasattr(thing, name)}
    attributes.update(getattr(thing, "__dict__", {}))
    # Cached properties are left out: computing one is no change of the dataset.
    known = [name for name in attributes if isinstance(getattr(type(thing), name, None), cached_property)]
    return [(name, value) for name, value in attributes.items() if name not in known]


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def are_same(attributes: list[Any], others: list[Any]) -> bool:
    """Whether numbers and strings are equal, and all other values the same objects; contents are not compared."""
    return len(attributes) == len(others) and all(
        one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and bool(one == other))
        for one, other in zip(attributes, others)
    )


class WorkersCopy:
    """What worker processes have got, to notice later changes of it.

    Args:
        things: datasets and functions; see `attributes_of`.
    """

    def __init__(self, *things: Any) -> None:
        self._things = things
        self._next_look = 0.0
        self._attributes = self._look()

    def _look(self) -> list[Any]:
        # Not the time for which other processes had the core, or the job was suspended.
        begin, used = time.monotonic(), time.thread_time()
        found = attributes_of(*self._things)
        self._next_look = begin + (time.thread_time() - used) / _SHARE_OF_LOOKS
        return found

    def is_current(self) -> bool:
        """Whether the things have the attributes that the workers got."""
        return are_same(self._look(), self._attributes)

    def warn_if_changed(self, position: int) -> int:
        """Warn once if numbers or texts have changed; returns the position in the stream to look again at."""
        if time.monotonic() < self._next_look:
            return position + _SAMPLES_BETWEEN_LOOKS
        now, before = _numbers_in(self._look()), _numbers_in(self._attributes)
        for one, other in zip_longest(now, before, fillvalue=("", None)):
            if not are_same([*one], [*other]):
                warn_once(
                    "%r of %s has changed while worker processes read. They have the dataset as it was when they "
                    "started, so the batches show the change in the next `for` loop, and in an endless stream never. "
                    "There, use num_workers=0 or worker_type='thread'.",
                    one[0] or other[0],
                    type(self._things[0]).__name__,
                )
                return sys.maxsize
        return position + _SAMPLES_BETWEEN_LOOKS


def _numbers_in(attributes: list[Any]) -> list[tuple[Any, Any]]:
    return [(name, value) for name, value in zip(attributes[::2], attributes[1::2]) if isinstance(value, _PLAIN)]
