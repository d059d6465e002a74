"""Fills batches of GPT samples from the memory map, with a few numpy calls for any number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from libai_data.data.cached_property import cached_property
from libai_data.data.datasets.gpt_index import Pieces
from libai_data.data.sources.indexed import IndexedSource

# If slices have at least so many tokens on average, copying slices is faster than looking up each token.
_TOKENS_A_SLICE = 256

_OF_WHOLE_SAMPLES = ("cu_seqlens", "max_seqlen")

Parts = Mapping[str, tuple[slice, ...]]


@dataclass(frozen=True)
class SampleForm:
    """Length and optional fields of samples."""

    length: int  # tokens
    position_ids: bool
    attention_mask: bool
    loss_mask: bool
    cu_seqlens: bool  # also adds `max_seqlen`
    masks_ends: bool  # whether the last token of a piece predicts nothing
    pad_id: int  # the token of the padding


@dataclass(frozen=True)
class _Stretch:
    """Rows of consecutive places of the stream, all of one width, and the pieces of each row."""

    firsts: np.ndarray  # int64 [rows], the first place of each row in the stream
    width: int  # places of a row
    pieces: np.ndarray  # int64 [n], the pieces of the rows, row after row
    rows: np.ndarray  # int64 [n], the row of each of these pieces
    begins: np.ndarray  # int64 [n], the first place of the row that is in the piece
    lengths: np.ndarray  # int64 [n], how many places of the row are in the piece

    @cached_property
    def places(self) -> np.ndarray:
        """Places in the stream, int64 [rows, width]."""
        return self.firsts[:, None] + np.arange(self.width)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Values of the pieces, [n], repeated for each of their places, [rows, width]."""
        return np.repeat(values, self.lengths).reshape(-1, self.width)


class BatchFiller:
    """Fills batches with tokens of a source.

    With packing, `firsts` is the first piece of each sample, int64 [samples + 1]; places are then pairs of tokens.
    """

    def __init__(self, source: IndexedSource, pieces: Pieces, firsts: np.ndarray | None, form: SampleForm) -> None:
        self._source = source
        self._pieces = pieces
        self._firsts = firsts
        self._form = form
        self._windows: dict[int, np.ndarray] = {}
        # The stream is one consecutive part of the file, and only the tokens are needed.
        self._is_plain = len(pieces.offsets) == 2 and list(self.fields) == ["input_ids", "labels"]

    def __getstate__(self) -> dict[str, Any]:
        # The windows are overlapping views. Pickle would store each view as a full copy.
        return {**self.__dict__, "_windows": {}}

    @property
    def fields(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Dtype and shape of each field of a sample."""
        form, vector = self._form, (self._form.length,)
        fields: dict[str, tuple[Any, tuple[int, ...]]] = {"input_ids": (np.int64, vector), "labels": (np.int64, vector)}
        if form.position_ids:
            fields["position_ids"] = np.int64, vector
        if form.attention_mask:
            fields["attention_mask"] = np.bool_, (form.length, form.length)
        if form.loss_mask:
            fields["loss_mask"] = np.float32, vector
        if form.cu_seqlens:
            fields["cu_seqlens"] = np.int32, (form.length + 1,)
            fields["max_seqlen"] = np.int32, ()
        return fields

    def fill(self, indices: np.ndarray, out: Mapping[str, np.ndarray], parts: Parts) -> None:
        """Fill the rows of a batch; see `GPTDataset.read_batch`."""
        length = self._form.length
        if self._is_plain and not parts:
            tokens = self._tokens_from(indices * length, length + 1)
            if "input_ids" in out:
                out["input_ids"][...] = tokens[:, :-1]
            if "labels" in out:
                out["labels"][...] = tokens[:, 1:]
            return
        whole = (slice(0, length),) * 2
        wanted = {name: parts.get(name, whole) for name in out if name not in _OF_WHOLE_SAMPLES}
        # Read the range that covers the needs of all fields; usually all fields need the same range.
        low = min((one.start for name in wanted for one in wanted[name]), default=0)
        high = max((one.stop for name in wanted for one in wanted[name]), default=0)
        wanted = {
            name: tuple(slice(one.start - low, one.stop - low) for one in slices) for name, slices in wanted.items()
        }
        if self._firsts is not None:
            self._fill_packed(self._firsts, indices, out, wanted, low, high - low)
        else:
            self._fill_stream(indices, out, wanted, low, high - low)

    def _fill_stream(
        self, indices: np.ndarray, out: Mapping[str, np.ndarray], wanted: Parts, low: int, width: int
    ) -> None:
        begins = indices * self._form.length
        if self._form.cu_seqlens:
            _fill_bounds(self._bounds(begins), out)
        if not width:
            return
        places = begins + low
        first = np.searchsorted(self._pieces.starts, places, side="right") - 1
        last = np.searchsorted(self._pieces.starts, places + width + 1, side="left")
        needs_pieces = self._form.position_ids or self._form.attention_mask or self._form.loss_mask
        if not needs_pieces and bool((last - first == 1).all()):
            # Each row is within one piece.
            offsets = places + (self._pieces.offsets[first] - self._pieces.starts[first])
            tokens = self._tokens_from(offsets, width + 1)
            _assign_shifted(tokens, out, wanted)
            return
        stretch = self._stretch(places, first, last, width + 1)
        tokens = self._tokens_of(stretch)
        if not needs_pieces:
            # Without a loss mask, no sample extends beyond the end of the stream.
            _assign_shifted(tokens, out, wanted)
            return
        after_end = stretch.places >= self._pieces.total
        if after_end.any():
            tokens[after_end] = self._form.pad_id
        _assign_shifted(tokens, out, wanted)
        self._fill_by_pieces(stretch, begins, ~after_end[:, :-1], ~after_end[:, 1:], out, wanted)

    def _bounds(self, begins: np.ndarray) -> np.ndarray:
        """Where pieces begin and end in the samples that begin at places `begins`, int64 [rows, length + 1]."""
        starts = self._pieces.starts
        first = np.searchsorted(starts, begins, side="right") - 1
        bounds = starts[np.minimum(first[:, None] + np.arange(self._form.length + 1), len(starts) - 1)]
        used = np.minimum(self._pieces.total - begins, self._form.length)
        return np.clip(bounds - begins[:, None], 0, used[:, None])

    def _fill_packed(
        self,
        firsts: np.ndarray,
        indices: np.ndarray,
        out: Mapping[str, np.ndarray],
        wanted: Parts,
        low: int,
        width: int,
    ) -> None:
        starts = self._pieces.starts
        first_pieces, next_pieces = firsts[indices], firsts[indices + 1]
        begins = starts[first_pieces]
        bounds = first_pieces[:, None] + np.arange(self._form.length + 1)
        _fill_bounds(starts[np.minimum(bounds, next_pieces[:, None])] - begins[:, None], out)
        if not width:
            return
        places = begins + low
        first = np.searchsorted(starts, places, side="right") - 1
        last = np.searchsorted(starts, places + width, side="left")
        stretch = self._stretch(places, first, last, width)
        has_token = stretch.places < starts[next_pieces][:, None]
        for name, shift in (("input_ids", 0), ("labels", 1)):
            if name in out:
                tokens = self._tokens_of(stretch, shift)
                tokens[~has_token] = self._form.pad_id
                out[name][...] = tokens[:, wanted[name][0]]
        self._fill_by_pieces(stretch, begins, has_token, has_token, out, wanted)

    def _fill_by_pieces(
        self,
        stretch: _Stretch,
        begins: np.ndarray,
        has_token: np.ndarray,
        counts: np.ndarray,
        out: Mapping[str, np.ndarray],
        wanted: Parts,
    ) -> None:
        """Fill the fields that depend on where pieces begin and end.

        Args:
            begins: int64 [rows], the places where the samples begin; a row may be a part of its sample.
            has_token, counts: bool [rows, width], whether a place has a token, and a next token to predict.
            wanted: field -> slices of the width.
        """
        width = counts.shape[1]
        if "position_ids" in out:
            since = np.maximum(self._pieces.starts[stretch.pieces], begins[stretch.rows])
            positions = (stretch.places - stretch.spread(since))[:, :width]
            out["position_ids"][...] = np.where(has_token, positions, 0)[:, wanted["position_ids"][0]]
        if "attention_mask" in out:
            pieces = stretch.spread(stretch.pieces)
            rows, columns = wanted["attention_mask"]
            same = pieces[:, rows, None] == pieces[:, None, columns]
            earlier = np.arange(rows.start, rows.stop)[:, None] >= np.arange(columns.start, columns.stop)
            np.logical_and(same, earlier, out=out["attention_mask"])
        if "loss_mask" in out:
            if self._form.masks_ends:
                ends = stretch.spread(self._pieces.starts[stretch.pieces + 1])[:, :width]
                counts = counts & (stretch.places[:, :width] != ends - 1)
            out["loss_mask"][...] = counts[:, wanted["loss_mask"][0]]

    def _stretch(self, places: np.ndarray, first: np.ndarray, last: np.ndarray, width: int) -> _Stretch:
        """The rows of `width` places from `places` [rows] on; each row has the pieces `first` to `last` - 1."""
        counts = last - first
        rows = np.repeat(np.arange(len(places)), counts)
        pieces = np.arange(len(rows)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        starts = self._pieces.starts
        begin = np.maximum(starts[pieces], places[rows])
        end = np.minimum(starts[pieces + 1], places[rows] + width)
        return _Stretch(places, width, pieces, rows, begin, end - begin)

    def _tokens_of(self, stretch: _Stretch, shift: int = 0) -> np.ndarray:
        """The tokens `shift` places after the places of the rows, [rows, width]; arbitrary after the stream's end."""
        tokens, size = self._source.tokens, len(stretch.firsts) * stretch.width
        # Added to a place in the stream, these give the token's place in the file.
        shifts = self._pieces.offsets[stretch.pieces] - self._pieces.starts[stretch.pieces] + shift
        inside = int(stretch.firsts.max()) + stretch.width <= self._pieces.total
        if inside and len(stretch.pieces) * _TOKENS_A_SLICE <= size:
            begins = stretch.begins + shifts
            slices = [tokens[begin:end] for begin, end in zip(begins.tolist(), (begins + stretch.lengths).tolist())]
            return np.concatenate(slices).reshape(-1, stretch.width)
        # Only places after the end of the stream are clipped.
        return tokens.take(stretch.places + stretch.spread(shifts), mode="clip")

    def _tokens_from(self, offsets: np.ndarray, width: int) -> np.ndarray:
        """Rows of `width` tokens of the file, [rows, width], each from an offset on."""
        tokens = self._source.tokens
        if width not in self._windows:
            shape, strides = (len(tokens) - width + 1, width), tokens.strides * 2
            self._windows[width] = np.lib.stride_tricks.as_strided(tokens, shape, strides, writeable=False)
        return self._windows[width][offsets]


def _fill_bounds(bounds: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
    """Fill `cu_seqlens` and `max_seqlen`; `bounds` are the bounds of documents in samples, int64 [rows, length + 1]."""
    if "cu_seqlens" in out:
        out["cu_seqlens"][...] = bounds
    if "max_seqlen" in out:
        out["max_seqlen"][...] = np.diff(bounds).max(axis=1)


def _assign_shifted(tokens: np.ndarray, out: Mapping[str, np.ndarray], wanted: Parts) -> None:
    """Fill tokens and next tokens from rows of both, [rows, width + 1]."""
    for name, shift in (("input_ids", 0), ("labels", 1)):
        if name in out:
            part = wanted[name][0]
            out[name][...] = tokens[:, part.start + shift : part.stop + shift]
