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


class _Stretch:
    """Rows of consecutive places of the stream, all of one width, and the pieces of each row.

    Args:
        starts: int64 [pieces + 2], see `gpt_index`.
        firsts: int64 [rows], the first place of each row in the stream.
        width: places of a row.

    Attributes:
        pieces: int64 [n], the pieces of the rows, row after row.
        rows: int64 [n], the row of each of these pieces.
        begins: int64 [n], the first place of the row that is in the piece.
        lengths: int64 [n], how many places of the row are in the piece.
    """

    def __init__(self, starts: np.ndarray, firsts: np.ndarray, width: int) -> None:
        self.firsts, self.width = firsts, width
        first = np.searchsorted(starts, firsts, side="right") - 1
        counts = np.searchsorted(starts, firsts + width, side="left") - first
        self.rows = np.repeat(np.arange(len(firsts)), counts)
        self.pieces = np.arange(len(self.rows)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        self.begins = np.maximum(starts[self.pieces], firsts[self.rows])
        self.lengths = np.minimum(starts[self.pieces + 1], firsts[self.rows] + width) - self.begins

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
        self._fill_part(indices, out, wanted, low, high - low)

    def _fill_part(
        self, indices: np.ndarray, out: Mapping[str, np.ndarray], wanted: Parts, low: int, width: int
    ) -> None:
        """Fill fields with `width` places of each sample, from `low` on; `wanted` are slices of these places."""
        starts, total, firsts, length = self._pieces.starts, self._pieces.total, self._firsts, self._form.length
        begins = indices * length if firsts is None else starts[firsts[indices]]
        ends = np.minimum(begins + length, total) if firsts is None else starts[firsts[indices + 1]]
        if self._form.cu_seqlens:
            first = np.searchsorted(starts, begins, side="right") - 1
            bounds = starts[np.minimum(first[:, None] + np.arange(length + 1), len(starts) - 1)]
            _fill_bounds(np.clip(bounds - begins[:, None], 0, (ends - begins)[:, None]), out)
        if not width:
            return
        # In a stream, the next token is that of the next place; with packing, it belongs to the place itself.
        stretch = _Stretch(starts, begins + low, width + (firsts is None))
        needs_tokens = self._form.position_ids or self._form.loss_mask
        has_token = stretch.places < (total if firsts is None else ends[:, None]) if needs_tokens else None
        inputs = self._tokens_of(stretch, has_token)
        labels = inputs[:, 1:] if firsts is None else self._tokens_of(stretch, has_token, shift=1)
        for name, tokens in (("input_ids", inputs), ("labels", labels)):
            if name in out:
                out[name][...] = tokens[:, wanted[name][0]]
        if "position_ids" in out and has_token is not None:
            since = np.maximum(starts[stretch.pieces], begins[stretch.rows])
            positions = np.where(has_token, stretch.places - stretch.spread(since), 0)
            out["position_ids"][...] = positions[:, wanted["position_ids"][0]]
        if "attention_mask" in out:
            pieces = stretch.spread(stretch.pieces)
            rows, columns = wanted["attention_mask"]
            same = pieces[:, rows, None] == pieces[:, None, columns]
            earlier = np.arange(rows.start, rows.stop)[:, None] >= np.arange(columns.start, columns.stop)
            np.logical_and(same, earlier, out=out["attention_mask"])
        if "loss_mask" in out and has_token is not None:
            # Whether a place has a next token to predict.
            counts = has_token[:, -width:]
            if self._form.masks_ends:
                ends_of_pieces = stretch.spread(starts[stretch.pieces + 1])
                counts = counts & (stretch.places != ends_of_pieces - 1)[:, :width]
            out["loss_mask"][...] = counts[:, wanted["loss_mask"][0]]

    def _tokens_of(self, stretch: _Stretch, has_token: np.ndarray | None, shift: int = 0) -> np.ndarray:
        """The tokens `shift` places after the places of the rows, [rows, width]; `pad_id` where there is no token."""
        tokens, rows = self._source.tokens, len(stretch.firsts)
        # Added to a place in the stream, these give the token's place in the file.
        shifts = self._pieces.offsets[stretch.pieces] - self._pieces.starts[stretch.pieces] + shift
        inside = int(stretch.firsts.max()) + stretch.width <= self._pieces.total
        begins = stretch.begins + shifts
        if inside and len(stretch.pieces) == rows:
            found = self._tokens_from(begins, stretch.width)
        elif inside and len(stretch.pieces) * _TOKENS_A_SLICE <= rows * stretch.width:
            slices = [tokens[begin:end] for begin, end in zip(begins.tolist(), (begins + stretch.lengths).tolist())]
            found = np.concatenate(slices).reshape(-1, stretch.width)
        else:
            # Only places after the end of the stream are clipped.
            found = tokens.take(stretch.places + stretch.spread(shifts), mode="clip")
        if has_token is not None and not has_token.all():
            found[~has_token] = self._form.pad_id
        return found

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
