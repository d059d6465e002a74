"""Masking for masked language models: chooses tokens to predict, and replaces them.

Sources: J. Devlin et al., "BERT" (2019), section 3.1: 15 % of the tokens, of these 80 % [MASK], 10 % random, 10 % kept;
whole words and n-grams as in Z. Lan et al., "ALBERT" (2020), section 4.1, and in LiBai.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from libai_data.data.datasets.vocabulary import VocabularyTables
from libai_data.errors import ConfigError, SchemaError
from libai_data.errors.argument_rules import check_types, whole

_SHARE_OF_MASKS, _SHARE_OF_KEPT = 0.8, 0.1
_MOST_NGRAMS = 1 << 10


@dataclass(frozen=True)
class Masking:
    """Settings of the masking."""

    probability: float = 0.15  # share of the tokens to predict
    # Up to so many consecutive words are masked together; n words with a probability in proportion to 1 / n.
    max_ngrams: int = 3
    whole_words: bool = True  # whether all tokens of a word are masked together
    # Whether "##" before a Chinese character only marks that it continues a word; the marks are removed.
    chinese_words: bool = False

    def __post_init__(self) -> None:
        check_types(Masking, vars(self), {"max_ngrams": whole(1, _MOST_NGRAMS)})
        if not 0 < self.probability < 1:
            raise ConfigError(f"mask_lm_prob is {self.probability}; it must be a number between 0 and 1")


class Masker:
    """Masks tokens; `mask_id` is the id of the mask token."""

    def __init__(self, tables: VocabularyTables, mask_id: int, masking: Masking) -> None:
        self._tables, self._mask_id, self._masking = tables, mask_id, masking
        self._ordinary = tables.ordinary
        if masking.chinese_words:
            # Tokens with a mark are no random replacements, because they never occur in running text.
            self._ordinary = self._ordinary[tables.unmarked[self._ordinary] == self._ordinary]
        weights = 1.0 / np.arange(1, masking.max_ngrams + 1)
        self._thresholds = np.cumsum(weights / weights.sum())[:-1]

    def mask(
        self, tokens: np.ndarray, special: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mask some tokens, int64 [n], but none that is `special`, bool [n].

        Returns:
            The tokens with masks, int64 [n]; the tokens without masks and without the marks of Chinese words, int64
            [n]; and bool [n], which tokens to predict.
        """
        largest, known = int(tokens.max(initial=0)), len(self._tables.unmarked)
        if largest >= known:
            raise SchemaError(
                f"the corpus has the token {largest}, but the tokenizer has only {known} tokens; give the tokenizer "
                "with which the corpus was made"
            )
        chosen = self.choose(tokens, special, random)
        clean = self._tables.unmarked[tokens] if self._masking.chinese_words else tokens
        positions = np.flatnonzero(chosen)
        drawn = random.random(len(positions))
        others = self._ordinary[random.integers(len(self._ordinary), size=len(positions))]
        replaced = np.where(drawn < _SHARE_OF_MASKS, self._mask_id, others)
        kept = (drawn >= _SHARE_OF_MASKS) & (drawn < _SHARE_OF_MASKS + _SHARE_OF_KEPT)
        masked = clean.copy()
        masked[positions] = np.where(kept, clean[positions], replaced)
        return masked, clean, chosen

    def choose(self, tokens: np.ndarray, special: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Choose the tokens to predict, bool [n]: `round(probability * n)`, at least 1, or fewer if no further n-gram
        of whole words fits. No token is chosen that is `special`, bool [n].

        If a word has more tokens than this number, each of its tokens counts as a word. So at least one token is
        chosen, unless all are special.
        """
        quota = max(1, round(len(tokens) * self._masking.probability))
        starts, ends = self._words(tokens, special, quota)
        count = len(starts)
        chosen = np.zeros(len(tokens), bool)
        if not count:
            return chosen
        order = random.permutation(count)
        lengths = np.searchsorted(self._thresholds, random.random(count), side="right") + 1
        # An n-gram ends before a special token.
        breaks = np.append(np.flatnonzero(starts[1:] != ends[:-1]) + 1, count)
        np.minimum(lengths, breaks[np.searchsorted(breaks, order, side="right")] - order, out=lengths)
        taken = bytearray(count)
        first, after = starts.tolist(), ends.tolist()
        for word, length in zip(order.tolist(), lengths.tolist()):
            while length and after[word + length - 1] - first[word] > quota:
                length -= 1
            if length and 1 not in taken[word : word + length]:
                taken[word : word + length] = b"\1" * length
                quota -= after[word + length - 1] - first[word]
                if not quota:
                    break
        words = np.flatnonzero(np.frombuffer(taken, np.uint8))
        change = np.zeros(len(tokens) + 1, np.int8)
        change[starts[words]] += 1
        change[ends[words]] -= 1
        np.cumsum(change[:-1], out=change[:-1])
        return change[:-1].astype(bool)

    def _words(self, tokens: np.ndarray, special: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
        """First token of each word, and the token after its last; words longer than `longest` are cut into tokens."""
        begins = ~special
        if self._masking.whole_words:
            continuing = self._tables.continues[tokens]
            continuing[0] = False
            continuing[1:] &= ~special[:-1]
            begins &= ~continuing
        # A special token ends a word too. It is listed as a word here, and removed below.
        bounds = np.flatnonzero(begins | special)
        lengths = np.diff(np.append(bounds, len(tokens)))
        if len(lengths) and lengths.max() > longest:
            begins |= np.repeat(lengths > longest, lengths)
            bounds = np.flatnonzero(begins | special)
        is_word = ~special[bounds]
        return bounds[is_word], np.append(bounds[1:], len(tokens))[is_word]


def padded(values: np.ndarray, length: int, filler: Any) -> np.ndarray:
    """The values, padded with `filler` at the end to `length`."""
    array = np.full(length, filler, values.dtype)
    array[: len(values)] = values
    return array
