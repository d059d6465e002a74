"""Packing: joins samples of different lengths, such as documents, into sequences of one length.

A packer that never cuts samples may choose among the samples of a *window*, a fixed number of places. All outputs of a
window are made of its samples. Then the window and the number of the output in the window determine an output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from libai_data.data.datasets.best_fit import best_fit_in_each
from libai_data.data.datasets.stream_transform import (
    LONGEST_SAMPLE,
    Keep,
    StreamTransform,
    place_and_offset,
    remember,
    start_of,
    trusted,
)
from libai_data.data.items import array_in, laid_out_like, named
from libai_data.data.nesting import array_of
from libai_data.data.random.global_generators import reads_beside_others
from libai_data.errors import ConfigError, SchemaError, nearest
from libai_data.errors.argument_rules import MAPPING, check_types, or_none, whole
from libai_data.mesh.arrays import as_array, check_padding
from libai_data.structures import Instance, check_field_names

# With these windows, and samples as long as web documents, less than 1.5 % of the tokens are padding, for any length.
_LEAST_WINDOW, _MOST_WINDOW, _TOKENS_A_SAMPLE = 256, 1 << 16, 16
_WINDOWS_KEPT = 4


class Window(NamedTuple):
    """The outputs of a window."""

    begin: int  # first place of the window
    end: int  # the place after the window, in the same lane
    last: int  # last place of the window
    outputs: list[np.ndarray]  # the places of the samples of each output, int64 [samples]
    samples: dict[int, Any]  # place -> sample that was read to measure its amount; empty if amounts were known

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """The starts of the outputs with these numbers, int64 [n]. The first output begins at the window's first place.
        All others begin at its last place, so the place after a start is the end of the used places."""
        return np.asarray(start_of(np.where(numbers, self.last, self.begin), numbers))


class PackedDataset(StreamTransform):
    """Packs samples into sequences of equal length, in the order of the sampler.

    Dim 0 of every field of a sample must be the length of the sample. A packed sequence has the same fields
    [length, ...] with their layouts, and two more, int64 [length] each: `segments`, the number of each token's sample
    from 1 on (0 for padding), and `positions`, each token's place in its sample.

    Args:
        dataset: the samples.
        length: length of a packed sequence, in tokens.
        cut: a sample that does not fit continues in the next sequence, so no sequence is padded. If False, a sequence
            has only whole samples, and is padded.
        lengths: length of each sample, int [samples]. If None, the process that plans the stream reads each sample.
        keep: which samples to pack; see `FilteredDataset`.
        truncate: without `cut`, cut longer samples to `length`; otherwise they raise an error.
        padding: field -> value to pad with, instead of 0.
        segments: name of the field of segments; None to leave it out.
        positions: name of the field of places in the segments; None to leave it out.
        window: without `cut`, the number of consecutive samples that are packed together by best fit. The default is
            `length` / 16, but at least 256 and at most 65,536. 0 packs samples in their order: a sequence ends before
            the first sample that does not fit.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        dataset: Any,
        length: int,
        *,
        cut: bool = True,
        lengths: Sequence[int] | np.ndarray | None = None,
        keep: Keep | None = None,
        truncate: bool = False,
        padding: Mapping[str, Any] | None = None,
        segments: str | None = "segment_ids",
        positions: str | None = "position_ids",
        window: int | None = None,
    ) -> None:
        check_types(PackedDataset, locals(), {"padding": or_none(MAPPING), "window": or_none(whole(0, _MOST_WINDOW))})
        if cut and window:
            raise ConfigError(
                f"window is {window}, but with cut=True no sequence is padded; set cut=False, or no window"
            )
        super().__init__(dataset, length, cut, keep)
        self.window = int(window or 0)
        if window is None and not cut:
            self.window = min(max(_LEAST_WINDOW, self.units // _TOKENS_A_SAMPLE), _MOST_WINDOW)
        # The last part of the key is as in `_amounts`.
        self._windows: OrderedDict[tuple[int, bool], Window] = OrderedDict()
        self._lengths = None if lengths is None else array_of(lengths, int)
        if self._lengths is not None and (
            self._lengths.dtype.kind not in "iu" or self._lengths.shape != (len(dataset),)
        ):
            raise ConfigError(
                f"lengths are {self._lengths.dtype} {list(self._lengths.shape)}; they must be {len(dataset)} ints, one "
                "for each sample"
            )
        self._truncate = truncate
        self._padding = dict(padding or {})
        self._segments = segments
        self._positions = positions

    @property
    def tokens_per_sample(self) -> int:
        """The length of a packed sequence, in tokens."""
        return self.units

    @property
    def reads_to_measure(self) -> bool:
        return super().reads_to_measure or self._lengths is None

    def _known_amounts(self, indices: np.ndarray) -> np.ndarray:
        amounts = np.asarray(self._lengths)[indices].astype(np.int64)
        if len(amounts) and int(amounts.min()) < 0:
            raise ConfigError(
                f"lengths has {int(amounts.min())} for sample {int(indices[amounts.argmin()])}; a length must be at "
                "least 0"
            )
        too_long = np.flatnonzero(amounts > (LONGEST_SAMPLE if self.cuts else self.units))
        if len(too_long):
            self._check_fits(int(amounts[too_long[0]]), f"sample {int(indices[too_long[0]])}")
        return amounts if self.cuts else np.minimum(amounts, self.units)

    def measured(self, sample: Any) -> int:
        length = _length_of(_arrays_of(sample))
        self._check_fits(length, "it")
        return length if self.cuts else min(length, self.units)

    def _check_fits(self, length: int, whose: str) -> None:
        if self.cuts and length > LONGEST_SAMPLE:
            raise ConfigError(f"{whose} has {length} tokens, but a packer can cut {LONGEST_SAMPLE} at most; split it")
        if not self.cuts and length > self.units and not self._truncate:
            raise ConfigError(
                f"{whose} has {length} tokens, which do not fit into a packed sequence of {self.units}; set cut=True, "
                "truncate=True or a greater length"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_windows": OrderedDict()}

    def replace_failing(self, known_bad: frozenset[int]) -> None:
        super().replace_failing(known_bad)
        self._windows.clear()

    def _amounts_from(self, place: int, offset: int, last: int, behind: int) -> tuple[np.ndarray, np.ndarray]:
        if not self.window:
            return super()._amounts_from(place, offset, last, behind)
        packed = [np.empty(0, np.int64)]
        begin, stop = self._window_bounds(place)
        while begin < last:
            packed += next(self._packed([(begin, stop)]))[0][offset : behind if last < stop else None]
            offset, (begin, stop) = 0, self._window_bounds(stop)
        epochs, indices = self._given_order.locate(np.concatenate(packed))
        return indices, self.amounts(epochs, indices)

    def window_at(self, place: int) -> Window:
        """The window that contains a place, packed by best fit. The last windows and their samples are cached."""
        return self.pack_windows(np.array([place]))[0]

    def pack_windows(self, places: np.ndarray) -> list[Window]:
        """`window_at` for several places at once, int64 [n]."""
        bounds = [self._window_bounds(place) for place in places.tolist()]
        found = [trusted(self._windows, begin) for begin, _ in bounds]
        missing = [row for row, window in enumerate(found) if window is None]
        for row, (outputs, samples) in zip(missing, self._packed([bounds[row] for row in missing])):
            begin, end = bounds[row]
            found[row] = Window(begin, end, end - self._given_order.lanes, outputs, samples)
            most = max(_WINDOWS_KEPT, 2 * self._given_order.lanes)
            remember(self._windows, (begin, reads_beside_others()), found[row], most)
        return found

    def _window_bounds(self, place: int) -> tuple[int, int]:
        size, lanes = self._given_order.epoch_size, self._given_order.lanes
        wide, epoch = self.window * lanes, place // size * size if self._in_rounds else 0
        first = epoch + (place - epoch) % lanes
        begin = first + (place - first) // wide * wide
        if not self._in_rounds:
            return begin, begin + wide
        return begin, min(begin + wide, begin - (begin - epoch - size) // lanes * lanes)

    def _packed(self, bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[list[np.ndarray], dict[int, Any]]]:
        """For each window, its outputs, and the samples that were read to measure them, by place."""
        if not bounds:
            return
        lanes = self._given_order.lanes
        windows = [np.arange(*bound, lanes) for bound in bounds]
        places = np.concatenate(windows)
        epochs, indices = self._given_order.locate(places)
        samples: dict[int, Any] = {}
        if self.reads_to_measure:
            for place, epoch, index in zip(places.tolist(), epochs.tolist(), indices.tolist()):
                if (self._kept is None or self._kept[index]) and trusted(self._amounts, epoch, index) is None:
                    samples[place] = self._measured_amount(epoch, index)[1]
        amounts = np.zeros((len(windows), self.window), np.int64)
        counts = np.array([len(window) for window in windows])
        amounts[np.arange(self.window) < counts[:, None]] = self.amounts(epochs, indices)
        for window, outputs in zip(windows, best_fit_in_each(amounts, self.units)):
            own = {place: samples[place] for place in window.tolist() if place in samples} if samples else samples
            yield [window[output] for output in outputs], own

    def _inputs_of(self, start: int) -> Iterator[tuple[int, Any, bool]]:
        """The samples of an output of a window; yields the same values as `inputs_from`."""
        place, number = place_and_offset(start)
        window = self.window_at(place)
        return self._inputs_at(window.outputs[number], window.samples)

    def __getitem__(self, start: int) -> Instance:
        """The packed sequence that begins at a start (`start_of`)."""
        place, offset = place_and_offset(start)
        offset = 0 if self.window else offset
        pieces: list[dict[str, np.ndarray]] = []
        room, first = self.units, None
        for index, sample, is_replacement in self._inputs_of(start) if self.window else self.inputs_from(place):
            arrays = _arrays_of(sample)
            if is_replacement and self._lengths is not None:
                # The plan was made with the length of the failed sample, so the replacement gets this length.
                length = int(self._lengths[index])
                arrays = {name: np.resize(array, (length, *array.shape[1:])) for name, array in arrays.items()}
            length = _length_of(arrays)
            if self._lengths is not None and length != self._lengths[index]:
                raise SchemaError(f"sample {index} has {length} tokens, but lengths says {self._lengths[index]}")
            if first is None:
                first = named(sample)
            check_field_names(list(arrays), list(first), f"sample {index}")
            end = min(length, offset + room) if self.cuts else min(length, self.units)
            if not self.cuts and end > room:
                break
            if end > offset:
                pieces.append({name: array[offset:end] for name, array in arrays.items()})
            room -= end - offset
            offset = 0
            if not room:
                break
        return self._joined(pieces, first or {}, room)

    def _joined(self, pieces: list[dict[str, np.ndarray]], like: Mapping[str, Any], room: int) -> Instance:
        packed = Instance()
        for name in self._padding:
            if name not in like:
                raise SchemaError(
                    f"padding is set for '{name}', but the samples have the fields {list(like)}.{nearest(name, like)}"
                )
        for name, value in like.items():
            parts = [piece[name] for piece in pieces]
            forms = {f"{part.dtype} {list(part.shape[1:])}" for part in parts}
            if len(forms) > 1:
                raise SchemaError(
                    f"field '{name}' of samples that are packed together differs: tokens are "
                    f"{' or '.join(sorted(forms))}"
                )
            if room:
                padding = self._padding.get(name, 0)
                for value_of_token in np.ravel(padding).tolist():
                    check_padding(name, parts[0].dtype, value_of_token)
                parts.append(np.full((room, *parts[0].shape[1:]), padding, parts[0].dtype))
            packed.set(name, laid_out_like(np.concatenate(parts), value))
        lengths = [_length_of(piece) for piece in pieces]
        layout = next(iter(like.values()))
        for added, values in (
            (self._segments, [np.full(length, number + 1) for number, length in enumerate(lengths)]),
            (self._positions, [np.arange(length) for length in lengths]),
        ):
            if added is None:
                continue
            if added in packed:
                raise SchemaError(f"there is a field '{added}' already; give the added field another name, or None")
            joined = np.concatenate([*values, np.zeros(room, dtype=np.int64)]).astype(np.int64)
            packed.set(added, laid_out_like(joined, layout))
        return packed

    def fingerprint(self) -> dict[str, Any]:
        own: dict[str, Any] = {"window": self.window} if self.window else {}
        if self._truncate:
            own["truncate"] = True
        return {**super().fingerprint(), **own}


def cu_seqlens(segment_ids: np.ndarray) -> np.ndarray:
    """The bounds of the segments of packed sequences, in the form for variable-length attention.

    Args:
        segment_ids: int [length] or [batch, length], the `segments` of `PackedDataset`; padding counts as a segment.

    Returns:
        int32 [segments + 1]: 0, then the end of each segment in the flattened `segment_ids`.
    """
    rows = np.atleast_2d(np.asarray(segment_ids))
    begins = np.ones(rows.shape, dtype=bool)
    begins[:, 1:] = rows[:, 1:] != rows[:, :-1]
    return np.append(np.flatnonzero(begins), rows.size).astype(np.int32)


def _arrays_of(sample: Any) -> dict[str, np.ndarray]:
    arrays = {name: as_array(array_in(value), name) for name, value in named(sample).items()}
    lengths: dict[str, tuple[int, ...]] = {name: array.shape[:1] for name, array in arrays.items()}
    if len(set(lengths.values())) > 1 or () in lengths.values():
        raise SchemaError(
            f"the first dims of a sample's fields are {lengths}; packing requires that the first dim of each field is "
            "the length of the sample"
        )
    return arrays


def _length_of(arrays: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(arrays.values())))
