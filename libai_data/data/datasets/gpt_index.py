"""Computes where GPT samples are in the files, vectorised over all documents, with no step per sample.

A corpus is read as a *stream*: its documents one after the other, epoch after epoch. The stream is described by
*pieces*. The tokens of a piece are consecutive in the `.bin` file:

- `starts`, int64 [pieces + 2]: the place in the stream at which each piece begins, the end of the stream, and a place
  that is never reached, so that places after the end belong to a piece as well;
- `offsets`, int64 [pieces + 1]: the token of the `.bin` file with which each piece begins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from libai_data.data.datasets.best_fit import best_fit
from libai_data.data.random.permutation import PERMUTATION_VERSION, whole_permutation

INDEX_VERSION = (1, PERMUTATION_VERSION)
"""Must change whenever the same corpus and arguments would give other samples."""

_NEVER = 2**62


class Pieces(NamedTuple):
    """A stream as pieces; the docstring of this module describes the arrays."""

    starts: np.ndarray
    offsets: np.ndarray

    @property
    def total(self) -> int:
        """Length of the stream."""
        return int(self.starts[-2])


def whole_corpus(tokens: int, num_epochs: int) -> Pieces:
    """The stream of a corpus in the order of its file: one piece for each epoch."""
    starts = np.arange(num_epochs + 2, dtype=np.int64) * tokens
    starts[-1] = _NEVER
    return Pieces(starts, np.zeros(num_epochs + 1, np.int64))


def documents(bounds: np.ndarray, num_epochs: int, seed: int | None, left_out: int = 0) -> Pieces:
    """The stream of a corpus, with a piece for each document that is not empty.

    Args:
        bounds: int64 [documents + 1], where documents begin and end in the `.bin` file, in tokens.
        seed: decides each epoch's order of documents; None for the order of the file.
        left_out: number of tokens at the end of each document that the stream leaves out.
    """
    offsets, lengths = bounds[:-1], np.maximum(np.diff(bounds) - left_out, 0)
    kept = np.flatnonzero(lengths)
    count = len(kept)
    starts = np.zeros(num_epochs * count + 2, np.int64)
    in_order = np.zeros(num_epochs * count + 1, np.int64)
    for epoch in range(num_epochs):
        order = kept if seed is None else kept[whole_permutation(count, seed, epoch)]
        first = epoch * count
        np.take(offsets, order, out=in_order[first : first + count])
        ends = starts[first + 1 : first + 1 + count]
        np.cumsum(lengths[order], out=ends)
        ends += starts[first]
    starts[-1] = _NEVER
    return Pieces(starts, in_order)


def packed(bounds: np.ndarray, length: int, num_epochs: int, seed: int | None) -> list[np.ndarray]:
    """Samples of whole documents. A place of the stream is a pair of a token and the next one: a document of n tokens
    has n - 1 pairs. A document with more pairs than a sample's `length` is cut. The pieces are packed by `best_fit`.

    Returns:
        `starts` and `offsets` of the pieces, in the order of the samples; and `firsts`, int64 [samples + 1], the first
        piece of each sample, and at the end the number of pieces. The arguments are as for `documents`.
    """
    whole = documents(bounds, num_epochs, seed, left_out=1)
    pairs = np.diff(whole.starts[:-1])
    cuts = -(-pairs // length)
    place = np.arange(int(cuts.sum())) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    lengths = np.minimum(np.repeat(pairs, cuts) - place * length, length)
    order, firsts = best_fit(lengths, length)
    offsets = np.append((np.repeat(whole.offsets[:-1], cuts) + place * length)[order], 0)
    starts = np.zeros(len(place) + 2, np.int64)
    np.cumsum(lengths[order], out=starts[1:-1])
    starts[-1] = _NEVER
    return [starts, offsets, firsts]
