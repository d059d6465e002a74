"""Samples of one passage each; together they have every token of a corpus.

A sample has as many whole sentences as fit, from one document after the other. If a sentence is longer than a sample,
such as a whole document, the sample has its beginning, and the next samples have the rest. Sources: Y. Liu et al.,
"RoBERTa" (2019), section 4.2, FULL-SENTENCES; C. Raffel et al., "T5" (2020), section 3.1.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from libai_data.data.datasets.sentence_index import SentenceRule, repeated, targets_of
from libai_data.errors import ConfigError

# The corpus is cut into stretches of so many tokens, which are processed together. The last sample of each is shorter.
_STRETCH = 1 << 20


class Passages(NamedTuple):
    """Samples in the order of the corpus."""

    start: np.ndarray  # int64 [samples], the place of each sample's first token in the corpus
    stop: np.ndarray  # int64 [samples], the place after its last token
    first_bound: np.ndarray  # int64 [samples], the number of the first document bound within each sample
    stop_bound: np.ndarray  # int64 [samples], the number after the last such bound
    used: np.ndarray  # int64 [1], tokens in all samples; a token in two samples counts twice


def find_passages(source: Any, rule: SentenceRule, separators: bool) -> Passages:
    """The samples of a corpus, by a rule; with `separators`, a sample needs room for one token between two documents.

    The corpus has `sizes`, the tokens of each sentence, `doc_idx`, the first sentence of each document, and
    `document_offsets()`. A ConfigError if it has no token.
    """
    line = _TokenLine(source, separators)
    if not line.ends[-1]:
        raise ConfigError("there is no token in the corpus's documents")
    begins, ends = repeated(lambda epoch: _one_epoch(line, rule, epoch), rule)
    start, stop = line.tokens_before(begins), line.tokens_before(ends)
    bounds = source.document_offsets()
    first_bound = np.searchsorted(bounds, start, side="right").astype(np.int64)
    stop_bound = np.searchsorted(bounds, stop, side="left").astype(np.int64)
    return Passages(start, stop, first_bound, np.maximum(first_bound, stop_bound), (stop - start).sum(keepdims=True))


class _TokenLine:
    """The corpus as one line of places: its tokens, and with separators a place before each document."""

    def __init__(self, source: Any, separators: bool) -> None:
        sizes = np.asarray(source.sizes)
        full = np.flatnonzero(sizes)
        numbers = np.unique(np.searchsorted(full, source.doc_idx))
        numbers = numbers[numbers < len(full)]
        self.separator = int(separators)
        self.ends = np.zeros(len(full) + 1, np.int64)  # 0, and the end of each sentence on the line
        self.ends[1:] = sizes[full]
        self.ends[1 + numbers] += self.separator
        np.cumsum(self.ends, out=self.ends)
        self.firsts = self.ends[numbers]  # int64 [documents], where documents begin, with their separators

    def after_separators(self, places: np.ndarray) -> np.ndarray:
        """The places; a place of a separator is moved to the token after it."""
        found = np.minimum(np.searchsorted(self.firsts, places), len(self.firsts) - 1)
        return places + self.separator * (self.firsts[found] == places)

    def tokens_before(self, places: np.ndarray) -> np.ndarray:
        """How many tokens, without separators, are before each place."""
        return places - self.separator * np.searchsorted(self.firsts, places)

    def sentence_at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The beginning and the length of the sentence at each place; length 0 after the end of the line."""
        number = np.searchsorted(self.ends, places, side="right") - 1
        begins = self.ends[number]
        return begins, self.ends[np.minimum(number + 1, len(self.ends) - 1)] - begins


def _one_epoch(line: _TokenLine, rule: SentenceRule, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Where samples begin and end on the line; each step of the loop finds one sample of each stretch."""
    total = int(line.ends[-1])
    cuts = np.arange(1, total // _STRETCH) * _STRETCH
    sentences, lengths = line.sentence_at(cuts)
    starts = np.unique([0, *np.where(lengths <= rule.max_tokens, sentences, cuts)])
    begins, limits = starts, np.append(starts[1:], total)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    while True:
        begins = line.after_separators(begins)
        unfinished = begins < limits
        begins, limits = begins[unfinished], limits[unfinished]
        if not len(begins):
            break
        ends = np.minimum(begins + targets_of(begins, rule, epoch), limits)
        sentences, lengths = line.sentence_at(ends)
        whole = (sentences > begins) & (lengths <= rule.max_tokens)
        ends = np.where(whole, sentences, ends)
        found.append((begins, ends))
        begins = ends
    all_begins, all_ends = (np.concatenate(arrays) for arrays in zip(*found))
    order = np.argsort(all_begins)
    return all_begins[order], all_ends[order]
