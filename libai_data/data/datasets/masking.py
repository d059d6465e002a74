"""Masking for language models that fill in words: which tokens, and what stands in their place.

Sources: J. Devlin et al., "BERT" (2019), section 3.1: 15 % of the tokens, of these 80 % [MASK], 10 % random, 10 % kept;
whole words and n-grams as in Z. Lan et al., "ALBERT" (2020), section 4.1, by which LiBai goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from libai_data.errors import ConfigError

_SHARE_OF_MASKS, _SHARE_OF_KEPT = 0.8, 0.1
_ROLES = ("cls", "sep", "mask", "pad", "bos", "eos", "unk")
# What a token begins with that begins a word, in byte-level BPE and in sentencepiece.
_WORD_MARKS = ("\u0120", "\u2581")


def special_id(tokenizer: Any, role: str) -> int:
    """The id of a special token.

    Args:
        tokenizer: has `<role>_token_id`, as those of this package, LiBai and Hugging Face have.
        role: such as "mask".

    Raises:
        ConfigError: The tokenizer has no such token.
    """
    ident = getattr(tokenizer, f"{role}_token_id", None)
    if ident is None:
        raise ConfigError(f"the tokenizer has no {role} token ({role}_token_id is None), which this dataset needs")
    return int(ident)


class VocabularyTables(NamedTuple):
    """What masking has to know of tokens, by their id.

    Args:
        continues: bool [ids], whether a token goes on with the word of the one before it.
        unmarked: int64 [ids], the token without the "##" of a Chinese character within a word; others are themselves.
        ordinary: int64 [n], ids that random replacements are drawn from: all but special ones.
    """

    continues: np.ndarray
    unmarked: np.ndarray
    ordinary: np.ndarray


def vocabulary_tables(tokenizer: Any) -> VocabularyTables:
    """Tables of a tokenizer's vocabulary.

    Words are told by "##" (WordPiece), or by the mark of white space before a token (byte-level BPE, sentencepiece).

    Args:
        tokenizer: has `get_vocab()`, token -> id.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    size = 1 + max(vocabulary.values())
    continues = np.zeros(size, bool)
    unmarked = np.arange(size, dtype=np.int64)
    wordpiece = any(token.startswith("##") for token in vocabulary)
    marked = not wordpiece and any(token.startswith(_WORD_MARKS) for token in vocabulary)
    for token, ident in vocabulary.items():
        continues[ident] = token.startswith("##") if wordpiece else marked and not token.startswith(_WORD_MARKS)
        if wordpiece and len(token) == 3 and "\u4e00" <= token[2] <= "\u9fa5" and token[:2] == "##":
            unmarked[ident] = vocabulary.get(token[2], ident)
    special = {getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES}
    special |= set(getattr(tokenizer, "additional_special_tokens_ids", None) or ())
    ordinary = np.array(sorted(set(vocabulary.values()) - special), np.int64)
    if not len(ordinary):
        raise ConfigError("the tokenizer's vocabulary has no tokens but special ones")
    return VocabularyTables(continues, unmarked, ordinary)


@dataclass(frozen=True)
class Masking:
    """How tokens are masked.

    Args:
        probability: share of the tokens.
        max_ngrams: up to so many words in a row are masked together; n words with a probability in proportion to 1 / n.
        whole_words: whether words are masked as a whole.
        chinese_words: whether "##" before Chinese characters only says which belong to one word, and is taken off.

    Raises:
        ConfigError: A number is out of range.
    """

    probability: float = 0.15
    max_ngrams: int = 3
    whole_words: bool = True
    chinese_words: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.probability < 1:
            raise ConfigError(f"the share of masked tokens is {self.probability}; it must be at least 0 and below 1")
        if self.max_ngrams < 1:
            raise ConfigError(f"max_ngrams is {self.max_ngrams}; at least 1 word is masked at a time")


class Masker:
    """Masks tokens.

    Args:
        tables: of the tokenizer.
        mask_id: id of the mask.
        masking: how.
    """

    def __init__(self, tables: VocabularyTables, mask_id: int, masking: Masking) -> None:
        self._tables, self._mask_id, self._masking = tables, mask_id, masking
        weights = 1.0 / np.arange(1, masking.max_ngrams + 1)
        self._thresholds = np.cumsum(weights / weights.sum())[:-1]

    def mask(
        self, tokens: np.ndarray, special: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mask some tokens.

        Args:
            tokens: int64 [n].
            special: bool [n], tokens that stay.
            random: draws.

        Returns:
            The tokens with masks, and bool [n], which are to be predicted.
        """
        chosen = self.choose(tokens, special, random)
        clean = self._tables.unmarked[tokens] if self._masking.chinese_words else tokens.copy()
        positions = np.flatnonzero(chosen)
        drawn = random.random(len(positions))
        others = self._tables.ordinary[random.integers(len(self._tables.ordinary), size=len(positions))]
        masked = np.where(drawn < _SHARE_OF_MASKS, self._mask_id, others)
        kept = (drawn >= _SHARE_OF_MASKS) & (drawn < _SHARE_OF_MASKS + _SHARE_OF_KEPT)
        clean[positions] = np.where(kept, clean[positions], masked)
        return clean, chosen

    def choose(self, tokens: np.ndarray, special: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Choose the tokens to predict: `round(probability * n)`, at least 1, or what whole words leave of these.

        Args:
            tokens: int64 [n].
            special: bool [n], tokens that are not chosen.
            random: draws.

        Returns:
            Bool [n].
        """
        quota = max(1, round(len(tokens) * self._masking.probability)) if self._masking.probability else 0
        starts, ends = self._words(tokens, special)
        count = len(starts)
        chosen = np.zeros(len(tokens), bool)
        if not quota or not count:
            return chosen
        order = random.permutation(count)
        lengths = np.searchsorted(self._thresholds, random.random(count), side="right") + 1
        # An n-gram ends where a special token does.
        breaks = np.append(np.flatnonzero(starts[1:] != ends[:-1]) + 1, count)
        np.minimum(lengths, breaks[np.searchsorted(breaks, order, side="right")] - order, out=lengths)
        taken = bytearray(count)
        first, behind = starts.tolist(), ends.tolist()
        for word, length in zip(order.tolist(), lengths.tolist()):
            while length and behind[word + length - 1] - first[word] > quota:
                length -= 1
            if length and 1 not in taken[word : word + length]:
                taken[word : word + length] = b"\1" * length
                quota -= behind[word + length - 1] - first[word]
                if not quota:
                    break
        words = np.flatnonzero(np.frombuffer(taken, np.uint8))
        change = np.zeros(len(tokens) + 1, np.int8)
        change[starts[words]] += 1
        change[ends[words]] -= 1
        np.cumsum(change[:-1], out=change[:-1])
        return change[:-1].astype(bool)

    def _words(self, tokens: np.ndarray, special: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First token of each word, and the one behind its last."""
        begins = ~special
        if self._masking.whole_words:
            goes_on = self._tables.continues[tokens]
            goes_on[0] = False
            goes_on[1:] &= ~special[:-1]
            begins &= ~goes_on
        # A special token ends a word too; it is put between the words, and left out.
        bounds = np.flatnonzero(begins | special)
        is_word = ~special[bounds]
        return bounds[is_word], np.append(bounds[1:], len(tokens))[is_word]


def padded(values: np.ndarray, length: int, filler: Any) -> np.ndarray:
    """Values, and fillers behind them up to a length."""
    array = np.full(length, filler, values.dtype)
    array[: len(values)] = values
    return array
