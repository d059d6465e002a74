"""Samples of one passage each, which hold every token of a corpus.

A sample takes whole sentences, of one document after the other, as many as fit. Of a sentence that is longer than a
sample, such as a whole document, it takes as much as fits, and the next sample the rest. Sources: Y. Liu et al.,
"RoBERTa" (2019), section 4.2, FULL-SENTENCES; C. Raffel et al., "T5" (2020), section 3.1.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from libai_data.data.datasets.sentence_index import SentenceRule, repeated, targets_of
from libai_data.errors import ConfigError

# Stretches that are gone through side by side; the last sample of each is not filled up.
_STRETCH = 1 << 20


class Passages(NamedTuple):
    """Samples in the order of the corpus."""

    start: np.ndarray  # int64 [samples], the place of the first token of each among all tokens
    stop: np.ndarray  # int64 [samples], the place behind its last
    first_bound: np.ndarray  # int64 [samples], the number of the first of the `doc_idx` that lie within each sample
    stop_bound: np.ndarray  # int64 [samples], the number behind the last
    used: np.ndarray  # int64 [1], tokens that samples hold, counted as often as they do


def find_passages(source: Any, rule: SentenceRule, separators: bool) -> Passages:
    """The samples of a corpus, by a rule; with `separators`, a token more lies between two documents of a sample.

    It has `sizes`, tokens of each sentence, `doc_idx`, the first sentence of each document, and `document_offsets()`.
    """
    lines = _Lines(source, separators)
    if not lines.ends[-1]:
        raise ConfigError("there is no token in the corpus's documents")
    begins, ends = repeated(lambda epoch: _one_epoch(lines, rule, epoch), rule)
    start, stop = lines.tokens_before(begins), lines.tokens_before(ends)
    bounds = source.document_offsets()
    first_bound = np.searchsorted(bounds, start, side="right").astype(np.int64)
    stop_bound = np.searchsorted(bounds, stop, side="left").astype(np.int64)
    return Passages(start, stop, first_bound, np.maximum(first_bound, stop_bound), (stop - start).sum(keepdims=True))


class _Lines:
    """The corpus as a line of tokens, with room for a separator before each document."""

    def __init__(self, source: Any, separators: bool) -> None:
        sizes = np.asarray(source.sizes)
        full = np.flatnonzero(sizes)
        numbers = np.unique(np.searchsorted(full, source.doc_idx))
        numbers = numbers[numbers < len(full)]
        self.separator = int(separators)
        self.ends = np.zeros(len(full) + 1, np.int64)  # of sentences on the line, from 0 on
        self.ends[1:] = sizes[full]
        self.ends[1 + numbers] += self.separator
        np.cumsum(self.ends, out=self.ends)
        self.firsts = self.ends[numbers]  # int64 [documents], where they begin, with their separators

    def behind_separators(self, places: np.ndarray) -> np.ndarray:
        """The places, one further where a separator lies."""
        found = np.minimum(np.searchsorted(self.firsts, places), len(self.firsts) - 1)
        return places + self.separator * (self.firsts[found] == places)

    def tokens_before(self, places: np.ndarray) -> np.ndarray:
        """How many tokens lie before places, without separators."""
        return places - self.separator * np.searchsorted(self.firsts, places)

    def sentence_at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the sentence begins that holds a place, and how long it is; 0 behind the end."""
        number = np.searchsorted(self.ends, places, side="right") - 1
        begins = self.ends[number]
        return begins, self.ends[np.minimum(number + 1, len(self.ends) - 1)] - begins


def _one_epoch(lines: _Lines, rule: SentenceRule, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Where samples begin and end on the line: the first of all stretches at once, then the second of all, ..."""
    total = int(lines.ends[-1])
    cuts = np.arange(1, total // _STRETCH) * _STRETCH
    sentences, lengths = lines.sentence_at(cuts)
    starts = np.unique([0, *np.where(lengths <= rule.max_tokens, sentences, cuts)])
    begins, limits = starts, np.append(starts[1:], total)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    while True:
        begins = lines.behind_separators(begins)
        going = begins < limits
        begins, limits = begins[going], limits[going]
        if not len(begins):
            break
        ends = np.minimum(begins + targets_of(begins, rule, epoch), limits)
        sentences, lengths = lines.sentence_at(ends)
        whole = (sentences > begins) & (lengths <= rule.max_tokens)
        ends = np.where(whole, sentences, ends)
        found.append((begins, ends))
        begins = ends
    all_begins, all_ends = (np.concatenate(arrays) for arrays in zip(*found))
    order = np.argsort(all_begins)
    return all_begins[order], all_ends[order]
