"""Packing: joins samples of different lengths, such as documents, into sequences of one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from libai_data.data.datasets.stream_transform import Keep, StreamTransform, place_and_offset
from libai_data.data.items import array_in, laid_out_like, named
from libai_data.data.nesting import array_of
from libai_data.errors import ConfigError, SchemaError, nearest
from libai_data.errors.argument_rules import MAPPING, check, check_types, or_none, whole
from libai_data.mesh.arrays import as_array, can_represent
from libai_data.structures import Instance, check_field_names

# With these windows, and samples as long as web documents, less than 1.5 % of the tokens are padding, for any length.
_LEAST_WINDOW, _MOST_WINDOW, _TOKENS_A_SAMPLE = 256, 1 << 16, 16


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
        check_types(PackedDataset, locals())
        check({"padding": or_none(MAPPING), "window": or_none(whole(0, _MOST_WINDOW))}, padding=padding, window=window)
        if cut and window:
            raise ConfigError(
                f"window is {window}, but with cut=True no sequence is padded; set cut=False, or no window"
            )
        super().__init__(dataset, length, cut, keep, window or 0)
        if window is None and not cut:
            self.window = min(max(_LEAST_WINDOW, self.units // _TOKENS_A_SAMPLE), _MOST_WINDOW)
        self._lengths = None if lengths is None else array_of(lengths)
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
        if self.cuts:
            return amounts
        too_long = np.flatnonzero(amounts > self.units)
        if len(too_long):
            self._check_fits(int(amounts[too_long[0]]), f"sample {int(indices[too_long[0]])}")
        return np.minimum(amounts, self.units)

    def measured(self, sample: Any) -> int:
        length = _length_of(_arrays_of(sample))
        if self.cuts:
            return length
        self._check_fits(length, "it")
        return min(length, self.units)

    def _check_fits(self, length: int, whose: str) -> None:
        if length > self.units and not self._truncate:
            raise ConfigError(
                f"{whose} has {length} tokens, which do not fit into a packed sequence of {self.units}; set cut=True, "
                "truncate=True or a greater length"
            )

    def __getitem__(self, start: int) -> Instance:
        """The packed sequence that begins at a start (`start_of`)."""
        place, offset = place_and_offset(start)
        offset = 0 if self.window else offset
        pieces: list[dict[str, np.ndarray]] = []
        room, first = self.units, None
        for index, sample, is_replacement in self.inputs_of(start) if self.window else self.inputs_from(place):
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
                if isinstance(padding, Real) and not can_represent(parts[0].dtype, padding):
                    raise SchemaError(
                        f"field '{name}' is padded with {padding!r}, which its dtype {parts[0].dtype} cannot hold; use "
                        "another value, or convert the field in the dataset"
                    )
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
            if added in like:
                raise SchemaError(
                    f"the samples have a field '{added}' already; choose another name for the added field, or None"
                )
            joined = np.concatenate([*values, np.zeros(room, dtype=np.int64)]).astype(np.int64)
            packed.set(added, laid_out_like(joined, layout))
        return packed

    def fingerprint(self) -> dict[str, Any]:
        own: dict[str, Any] = {"truncate": True} if self._truncate else {}
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
