"""Small corpora and tokenizers for the tests of text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.sources.indexed import IndexedSource
from libai_data.data.text.tokenizer_training import Training, train_tokenizer

WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"),
    *("while", "seven", "wizards", "make", "toxic", "brew", "for", "evil", "queens"),
]


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to 5 sentences."""
    random = np.random.default_rng(seed)
    return [
        " ".join(
            " ".join(random.choice(WORDS, random.integers(3, 12))).capitalize() + "."
            for _ in range(random.integers(1, 6))
        )
        for _ in range(count)
    ]


def write_json_lines(path: Path, documents: list[str], behind: str = "") -> Path:
    """Write documents as JSON lines, and something behind them."""
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents]
    path.write_text("".join([*lines, behind]), "utf-8")
    return path


def bpe_tokenizer(folder: Path) -> str:
    """Train a small byte-level BPE tokenizer; returns the path of its file."""
    corpus = write_json_lines(folder / "for_bpe.jsonl", texts(300, seed=9))
    train_tokenizer([str(corpus)], str(folder / "bpe.json"), Training(vocab_size=400))
    return str(folder / "bpe.json")


@cache
def _trained_byte_level(vocab_size: int) -> str:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(100), trainer)
    return str(tokenizer.to_str())


def byte_level_folder(
    folder: Path,
    special: list[str],
    config: dict[str, Any] | None = None,
    text_tokens: Sequence[str] = (),
    vocab_size: int = 300,
) -> Path:
    """A folder as Hugging Face's: a byte-level BPE, some special tokens, and others that are text."""
    import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_str(_trained_byte_level(vocab_size))
    tokenizer.add_tokens(list(text_tokens))
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def documents_of(prefix: str) -> list[list[list[int]]]:
    """Sequences of each document of an indexed dataset."""
    source = IndexedSource(prefix)
    bounds = source.doc_idx.tolist()
    return [[source[number].tolist() for number in range(*ends)] for ends in zip(bounds, bounds[1:])]


def content(prefix: str) -> list[bytes]:
    """The bytes of the two files."""
    return [Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")]
