"""Corpora of numbered tokens, and a tokenizer, for the tests of BERT's, RoBERTa's and T5's datasets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from libai_data.data.random.sample_random import reading_samples
from libai_data.data.sources.indexed import IndexedSource
from libai_data.data.sources.indexed_writer import IndexedWriter

PAD, UNK, CLS, SEP, MASK, BOS, EOS = range(7)
FIRST = 107
"""The first token that is not special; before it come 100 sentinels."""


class Tokenizer:
    """A vocabulary of numbered words; `marks` are what tokens begin with.

    Args:
        words: how many.
        pieces: how many "##" pieces come behind them.
    """

    pad_token_id, unk_token_id, cls_token_id, sep_token_id, mask_token_id, bos_token_id, eos_token_id = range(7)

    def __init__(self, words: int = 1000, pieces: int = 500, extra: Sequence[str] = ()) -> None:
        special = [f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK", "BOS", "EOS")]
        special += [f"<extra_id_{number}>" for number in range(100)]
        tokens = [*special, *(f"w{n}" for n in range(words)), *(f"##p{n}" for n in range(pieces)), *extra]
        self.vocabulary = {token: ident for ident, token in enumerate(tokens)}
        self.additional_special_tokens_ids: list[int] | None = list(range(7, FIRST))

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary


def write_corpus(prefix: Path, documents: Sequence[Sequence[Any]]) -> IndexedSource:
    """Write documents of sentences of tokens."""
    with IndexedWriter(prefix, np.uint16) as writer:
        for sentences in documents:
            writer.add_document([np.asarray(sentence, np.uint16) for sentence in sentences])
    return IndexedSource(prefix)


def random_corpus(prefix: Path, documents: int, tokens: int = 1000, pieces: int = 500, seed: int = 0) -> IndexedSource:
    """Documents of 2 to 20 sentences of 5 to 60 tokens, about a third of them pieces of words."""
    random = np.random.default_rng(seed)

    def sentence() -> np.ndarray:
        length = random.integers(5, 60)
        words = FIRST + random.integers(tokens, size=length)
        inner = FIRST + tokens + random.integers(max(pieces, 1), size=length)
        return np.where((random.random(length) < 0.33 * bool(pieces)) & (np.arange(length) > 0), inner, words)

    return write_corpus(prefix, [[sentence() for _ in range(random.integers(2, 21))] for _ in range(documents)])


def read(dataset: Any, index: int, epoch: int = 0, seed: int = 5) -> dict[str, np.ndarray]:
    """A sample as a loader reads it."""
    with reading_samples([(seed, epoch, index)]):
        return {name: value.tensor for name, value in dataset[index].get_fields().items()}


def of_sizes(documents: Sequence[Sequence[int]]) -> Any:
    """What an index asks of a corpus: the tokens of each sentence of documents."""
    sizes = np.array([size for document in documents for size in document], np.int32)
    bounds = np.cumsum([0, *map(len, documents)])
    offsets = np.cumsum([0, *sizes])[bounds]
    return SimpleNamespace(sizes=sizes, doc_idx=bounds, document_offsets=lambda: offsets)
