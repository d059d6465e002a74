"""Stream transforms: filters and packers, which do not make exactly one output of each sample of a stream.

A transform makes each *output* of a fixed number of *units*. Each input sample yields an *amount* of units. For a
filter, an output has one unit, and a sample yields one unit or none. For a packer, an output has as many units as a
sequence has tokens, and a sample yields its tokens. Outputs use the units in the order of the stream, on every rank. So
two numbers determine an output: the place at which it begins, and the offset in the sample at this place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Callable, Protocol, Union

import numpy as np

from libai_data.data.attributes import attribute_of, has_attribute
from libai_data.data.datasets.combine import length_of
from libai_data.data.datasets.fingerprint import fingerprint_of, hash_of
from libai_data.data.nesting import array_of
from libai_data.data.random.global_generators import GlobalDraws, reads_beside_others
from libai_data.data.random.sample_random import reading_inputs, reading_now
from libai_data.data.random.substitute import Replacement, read_or_substitute
from libai_data.errors import ConfigError, SchemaError, failed_reading

Keep = Union[Callable[[Any], bool], Sequence[bool], np.ndarray]

Start = Union[int, tuple[int, ...]]
"""Where the next output begins (`start_of`). With lanes, a tuple of the starts of all lanes, ordered by turn.
In passes of one epoch with lanes, the epoch and the turn of the next output's lane precede these starts."""

_PLACE_BITS = 40
MOST_PLACES = 1 << _PLACE_BITS
LONGEST_SAMPLE = 1 << (63 - _PLACE_BITS)
"""Most units of a sample that may continue in the next output: its offsets must fit into a start of 63 bits."""
_MOST_UNITS = 1 << 22
_LEFT_OUT = object()  # this value is returned for a sample that is not kept
_LOOKED_UP = 32
_REMEMBERED = 1 << 16


class InputOrder(Protocol):
    """The order of the samples that a transform reads."""

    @property
    def seed(self) -> int:
        """Decides, with epoch and index, what random transforms draw."""

    @property
    def lanes(self) -> int:
        """Number of lanes: an output has samples of every `lanes`-th place."""

    @property
    def epoch_size(self) -> int:
        """Places of one epoch."""

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epochs and indices at these places, int64 [n] each."""


def start_of(place: Any, offset: Any) -> Any:
    """Encode where an output begins, a place and an offset in units into its sample, as one int or int64 array."""
    return (offset << _PLACE_BITS) | place


def place_and_offset(start: Any) -> tuple[Any, Any]:
    """Decode a start to the place and the offset in units; the inverse of `start_of`."""
    return start & (MOST_PLACES - 1), start >> _PLACE_BITS


def starts_of(start: Start) -> tuple[int, ...]:
    """Where the next output of each lane begins; without lanes, that of the stream."""
    return start if isinstance(start, tuple) else (start,)


def remember(known: OrderedDict[Any, Any], key: Any, value: Any, most: int = _REMEMBERED) -> None:
    """Store a value as the newest one, and drop the oldest ones if there are more than `most`."""
    with suppress(KeyError):  # Another thread may drop this key, or the value that this thread is dropping.
        known[key] = value
        known.move_to_end(key)
        while len(known) > most:
            known.popitem(last=False)


class StreamTransform:
    """Base of the transforms. Its index is the start of an output (`start_of`), its length is that of the dataset.

    Args:
        dataset: the input samples; random transforms draw from the seed of the sampler. If this is a `FilteredDataset`,
            its filter is applied too.
        units: number of units of an output.
        cuts: whether a sample may continue in the next output.
        keep: which samples to keep: a function of the sample, or a bool for each sample; None keeps all.

    Raises:
        ConfigError: An argument is out of range.
    """

    is_stream_transform = True
    window = 0
    """Number of places of a window; 0 if outputs use the samples in order. Only a `PackedDataset` has windows."""

    def __init__(self, dataset: Any, units: int, cuts: bool, keep: Keep | None) -> None:
        if not isinstance(units, (int, np.integer)) or isinstance(units, bool) or not 1 <= units <= _MOST_UNITS:
            raise ConfigError(f"the length of an output is {units!r}; it must be an int of 1 to {_MOST_UNITS}")
        keeps: tuple[Callable[[Any], bool], ...] = (keep,) if callable(keep) else ()
        samples = length_of(dataset)
        kept = None if keep is None or callable(keep) else array_of(keep, bool)
        if kept is not None and (kept.dtype != bool or kept.shape != (samples,)):
            raise ConfigError(
                f"keep is {kept.dtype} {list(kept.shape)}; it must be a function of a sample, or {samples} bools, one "
                "for each"
            )
        if isinstance(dataset, FilteredDataset) and type(dataset).__getitem__ is FilteredDataset.__getitem__:
            keeps = (*dataset._keeps, *keeps)
            if dataset._kept is not None:
                kept = dataset._kept if kept is None else dataset._kept & kept
            dataset = dataset.dataset
        elif has_attribute(dataset, "is_stream_transform"):
            raise ConfigError(
                f"{type(self).__name__} got a {type(dataset).__name__}, whose samples have no index of their own; pack "
                "or filter a OneRound of it, or filter before packing"
            )
        self.dataset: Any = dataset
        self.units = int(units)
        self.cuts = cuts
        # The last part of the key is `reads_beside_others()` at the time of the read; see `trusted`.
        self._amounts: OrderedDict[tuple[int, int, bool], int] = OrderedDict()
        self._keeps: tuple[Callable[[Any], bool], ...] = keeps
        self._kept: np.ndarray | None = kept
        # Computed here, because it passes over all samples, and a restore must stay O(1).
        self._kept_hash = "" if kept is None else hash_of(np.ascontiguousarray(kept).data)
        self._order: InputOrder | None = None
        self._in_rounds = False
        self._draws = GlobalDraws(type(dataset).__name__)
        self._known_bad: frozenset[int] | None = None
        self._planned: OrderedDict[tuple[int, int], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        # Another process computes the amounts again.
        return {**self.__dict__, "_amounts": OrderedDict()}

    @property
    def blend(self) -> Any:
        """The blend of the dataset; None if the dataset is no blend."""
        return attribute_of(self.dataset, "blend")

    @property
    def reads_to_measure(self) -> bool:
        """Whether samples must be read to measure their amounts."""
        return bool(self._keeps)

    def follow_order(self, order: InputOrder, in_rounds: bool = False) -> None:
        """Set the order of the samples; a sampler calls this before any sample is read. In rounds, no output has
        samples of two epochs. A ConfigError if another sampler has set another order."""
        if self._order is not None and (self._order, self._in_rounds) != (order, in_rounds):
            first, second = ("of single epochs" if finite else "without end" for finite in (self._in_rounds, in_rounds))
            raise ConfigError(
                f"one {type(self).__name__} serves two samplers of different orders ({self._order} {first} and "
                f"{order} {second}); make one for each"
            )
        self._order, self._in_rounds = order, in_rounds

    def replace_failing(self, known_bad: frozenset[int]) -> None:
        """From now on, replace samples that fail, or are known to be bad; replacements are the same in all
        processes."""
        self._known_bad = known_bad
        self._amounts.clear()

    def planned_replacement(self, epoch: int, index: int) -> int | None:
        """The replacement that `amounts` has measured for a failed sample; None if there was none."""
        return self._planned.get((epoch, index))

    def amounts(self, epochs: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """The units, at least 0, that the samples with these epochs and indices yield; int64 [n] each."""
        kept = np.ones(len(indices), dtype=bool) if self._kept is None else self._kept[indices]
        found = np.zeros(len(indices), dtype=np.int64)
        if not self.reads_to_measure:
            found[kept] = self._known_amounts(indices[kept])
            return found
        for row in np.flatnonzero(kept).tolist():
            epoch, index = int(epochs[row]), int(indices[row])
            amount = trusted(self._amounts, epoch, index)
            found[row] = self._measured_amount(epoch, index)[0] if amount is None else amount
        return found

    def _measured_amount(self, epoch: int, index: int) -> tuple[int, Any]:
        """Read a sample; return its units, and the result of the read."""
        sample, replacement = read = self._read(epoch, index)
        try:
            amount = 0 if sample is _LEFT_OUT else self.measured(sample)
        except (ConfigError, SchemaError) as error:
            raise type(error)(f"sample {index}: {error}") from error
        remember(self._amounts, (epoch, index, reads_beside_others()), amount)
        if replacement is not None:
            remember(self._planned, (epoch, index), replacement.chosen)
        return amount, read

    def amounts_between(self, first: Start, end: Start) -> tuple[np.ndarray, np.ndarray]:
        """The samples of the outputs from the start of the first output up to that of the output after the last one:
        their indices, and the units of each in these outputs, int64 [n] each."""
        if isinstance(first, tuple) and isinstance(end, tuple):
            found = [self.amounts_between(*of_lane) for of_lane in zip(first, end)]
            return np.concatenate([indices for indices, _ in found]), np.concatenate([amounts for _, amounts in found])
        return self._amounts_from(*place_and_offset(first), *place_and_offset(end))

    def _amounts_from(self, place: int, offset: int, last: int, behind: int) -> tuple[np.ndarray, np.ndarray]:
        """`amounts_between` the start of an output (place, offset) and another start (last, behind), of one lane."""
        epochs, indices = self._given_order.locate(np.arange(place, last + (behind > 0), self._given_order.lanes))
        amounts = self.amounts(epochs, indices)
        if behind:
            amounts[-1] = behind
        if len(amounts):
            amounts[0] -= offset
        return indices, amounts

    def _known_amounts(self, indices: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def measured(self, sample: Any) -> int:
        """The units that a sample yields, if it was read."""
        raise NotImplementedError

    @property
    def _given_order(self) -> InputOrder:
        if self._order is None:
            name = type(self).__name__
            raise ConfigError(
                f"no sampler has set the order in which this {name} reads the samples; pass it itself to a loader of "
                f"this package, with a batch size, or read it by index as OneRound({name}(...))"
            )
        return self._order

    def _read(self, epoch: int, index: int) -> tuple[Any, Replacement | None]:
        """A sample or `_LEFT_OUT`; and a `Replacement` if the sample replaces a failed sample, else None. A SampleError
        if the sample cannot be read, and is not replaced, or all its replacements failed."""
        seed = self._given_order.seed
        read = partial(self._read_one, seed, epoch)
        if self._known_bad is None:
            return read(index), None
        return read_or_substitute(read, (seed, epoch, index), self._known_bad, self._candidates)

    def _candidates(self) -> Sequence[int]:
        return range(len(self.dataset)) if self._kept is None else np.flatnonzero(self._kept)  # type: ignore[return-value]

    def _read_one(self, seed: int, epoch: int, index: int) -> Any:
        """A sample or `_LEFT_OUT`; its random draws do not depend on the process that reads it."""
        key = seed, epoch, index

        def read() -> Any:
            with reading_inputs((key,)):
                sample = self.dataset[index]
                return sample if all(keep(sample) for keep in self._keeps) else _LEFT_OUT

        try:
            return self._draws.around(read, key)
        except BaseException as error:
            raise failed_reading(f"sample {index} of {type(self.dataset).__name__}", error) from error

    def inputs_from(self, place: int) -> Iterator[tuple[int, Any, bool]]:
        """The kept samples from a place of the order on: index, sample, and whether it is a replacement."""
        # If the dataset grows, the epochs of the order keep their length until the next pass, which is refused.
        size, lanes = self._given_order.epoch_size, self._given_order.lanes
        stop = (place // size + 1) * size if self._in_rounds else MOST_PLACES
        while place < stop:
            places = np.arange(place, min(place + _LOOKED_UP * lanes, stop), lanes)
            if not (yield from self._inputs_at(places, {})):
                return
            place += _LOOKED_UP * lanes

    def _inputs_at(self, places: np.ndarray, known: Mapping[int, Any]) -> Generator[tuple[int, Any, bool], None, int]:
        """The kept samples at these places; returns the number of places that the order has."""
        reading = reading_now()
        epochs, indices = self._given_order.locate(places)
        for place, epoch, index in zip(places.tolist(), epochs.tolist(), indices.tolist()):
            if self._kept is not None and not self._kept[index]:
                continue
            sample, replacement = known.get(place) or self._read(epoch, index)
            if replacement is not None and reading is not None:
                reading.replaced = [*reading.replaced, (epoch, index, *replacement)]
            if sample is not _LEFT_OUT:
                yield index, sample, replacement is not None
        return len(indices)

    def __getitem__(self, start: int) -> Any:
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        """The dataset's fingerprint and this transform's parameters; a `keep` function is represented by its name."""
        own: dict[str, Any] = {"units": self.units, "cuts": self.cuts}
        names = [attribute_of(keep, "__qualname__", type(keep).__name__) for keep in self._keeps]
        if self._kept is not None:
            names.append(self._kept_hash)
        if names:
            own["keep"] = names[0] if len(names) == 1 else names
        return {**fingerprint_of(self.dataset), "samples": len(self.dataset), **own}


def trusted(known: Mapping[Any, Any], *key: int) -> Any:
    """The cached value, or None. Threads that share the random generators may draw wrongly, so others skip theirs."""
    found = known.get((*key, False))
    return known.get((*key, True)) if found is None and reads_beside_others() else found


class FilteredDataset(StreamTransform):
    """The samples of a dataset that a condition keeps; the loader skips the others.

    Args:
        dataset: the samples.
        keep: a function of a sample that returns whether to keep it, or a bool for each sample. For a function, the
            process that plans the stream reads every sample. The result must depend on the sample alone.

    Raises:
        ConfigError: `keep` is neither.
    """

    def __init__(self, dataset: Any, keep: Keep) -> None:
        super().__init__(dataset, 1, False, keep)

    def _known_amounts(self, indices: np.ndarray) -> np.ndarray:
        return np.ones(len(indices), dtype=np.int64)

    def measured(self, sample: Any) -> int:
        return 1

    def __getitem__(self, start: int) -> Any:
        return next(self.inputs_from(place_and_offset(start)[0]))[1]
