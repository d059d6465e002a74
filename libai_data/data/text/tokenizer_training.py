"""Training a tokenizer, BPE or WordPiece, on the documents of a corpus."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libai_data.atomic_files import written_whole
from libai_data.data.text.documents import Document, check_keys, read_piece
from libai_data.data.text.encoders import as_bert, as_gpt2
from libai_data.data.text.files import find_inputs
from libai_data.data.text.parts import Cutting, cut_into_parts
from libai_data.data.text.tokenizer import MOST_TOKENS
from libai_data.errors import ConfigError, installed
from libai_data.errors.argument_rules import OUTPUT_FILE, check, check_types, instance_of, or_none, whole

logger = logging.getLogger(__name__)

BPE, WORDPIECE = "bpe", "wordpiece"
MODELS = (BPE, WORDPIECE)
_SPECIAL: dict[str, tuple[str, ...]] = {
    BPE: ("<|endoftext|>",),
    WORDPIECE: ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]"),
}
_BYTES = 256
_RULES = {"vocab_size": whole(1, MOST_TOKENS), "min_frequency": whole(0), "extra_ids": whole(0, MOST_TOKENS)}


@dataclass(frozen=True)
class Training:
    """The settings of a tokenizer to train.

    Args:
        model: "bpe", byte-level as GPT-2's, or "wordpiece", as BERT's.
        vocab_size: number of tokens, special ones included.
        min_frequency: how often a pair of tokens must occur to be merged.
        lower_case: convert to lower case and strip accents (WordPiece).
        extra_ids: sentinels `<extra_id_0>` ... for T5, among the special tokens.

    Raises:
        ConfigError: There is no such model, or the vocabulary is too small for it.
    """

    model: str = BPE
    vocab_size: int = 30000
    min_frequency: int = 2
    lower_case: bool = False
    extra_ids: int = 0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"model={self.model!r}: a tokenizer to train is one of {list(MODELS)}")
        if self.lower_case and self.model == BPE:
            raise ConfigError("lower_case is for wordpiece; byte-level BPE keeps every byte")
        check_types(Training, vars(self), _RULES)
        least = len(_SPECIAL[self.model]) + self.extra_ids + (_BYTES if self.model == BPE else 1)
        if self.vocab_size < least:
            raise ConfigError(f"vocab_size is {self.vocab_size}; {self.model} needs at least {least}")

    def special_tokens(self) -> list[str]:
        """The special tokens, whose ids are the first ones, in this order."""
        return [*_SPECIAL[self.model], *(f"<extra_id_{number}>" for number in range(self.extra_ids))]


_GIVEN = {"output": OUTPUT_FILE, "training": instance_of(Training), "cutting": or_none(instance_of(Cutting))}


def train_tokenizer(
    inputs: Sequence[str],
    output: str,
    training: Training,
    *,
    keys: Sequence[str] = ("text",),
    cutting: Cutting | None = None,
) -> int:
    """Train a tokenizer, and write it as a `tokenizer.json`; the same input gives the same file, byte for byte.

    Args:
        inputs: files, globs or folders.
        output: the file to write; its folder is made.
        training: the settings.
        keys: the keys of JSON objects, or columns, that hold text.
        cutting: the format of the files.

    Returns:
        The number of tokens. A small corpus may give fewer than `vocab_size`, one with very many characters more.

    Raises:
        ConfigError: There is no input or no document; an argument has another type; a key is given twice; or the output
            is an input, no path of a file on this machine, or in a folder that may not be written to.
    """
    check(_GIVEN, output=output, training=training, cutting=cutting)
    cutting = cutting or Cutting()
    check_keys(keys)
    path = Path(output)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"output is {path}, but nothing can be written in {folder}; give another path")
    files = find_inputs(inputs, cutting.format, [path])
    if os.path.realpath(path) in map(os.path.realpath, files):
        raise ConfigError(f"output is {path}, which is an input too, and would be overwritten; give another path")
    documents = _Texts(files, keys, cutting)
    inner = _inner_characters(documents, training) if training.model == WORDPIECE else []
    tokenizer, trainer = _untrained(training, training.vocab_size, inner)
    tokenizer.train_from_iterator(iter(documents), trainer)
    if not documents.count:
        why = f": {documents.first_bad}" if documents.first_bad else ""
        raise ConfigError(f"there is no document in {list(inputs)} to train a tokenizer on{why}")
    if documents.first_bad:
        logger.warning("Some lines have no document and are skipped, first %s", documents.first_bad)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [added for added in content["added_tokens"] if added["content"] not in inner]
    tokenizer = type(tokenizer).from_str(json.dumps(content))
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as unfinished:
        unfinished.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    return int(tokenizer.get_vocab_size())


class _Texts:
    """The texts of a corpus, read as they are needed; bad lines are left out."""

    def __init__(self, paths: Sequence[Path], keys: Sequence[str], cutting: Cutting) -> None:
        self._paths, self._keys, self._cutting = paths, keys, cutting
        self.count = 0
        self.first_bad = ""

    def __iter__(self) -> Iterator[str]:
        for part in cut_into_parts(self._paths, self._cutting):
            for piece in part.pieces:
                for record in read_piece(piece, self._keys):
                    if isinstance(record, Document):
                        self.count += any(map(str.strip, record.texts))
                        yield from record.texts
                    elif not self.first_bad:
                        self.first_bad = f"{piece.path}: {record.reason}"


def _inner_characters(documents: _Texts, training: Training) -> list[str]:
    """The characters within words, as WordPiece has them: "##a", "##b", ..., sorted.

    The trainer numbers them in the arbitrary order of a hash table, and decides between equally frequent pairs by these
    numbers. So the caller passes them in sorted order.
    """
    tokenizer, trainer = _untrained(training, 0, [])
    tokenizer.train_from_iterator(iter(documents), trainer)
    return sorted(
        token for token in tokenizer.get_vocab(with_added_tokens=False) if len(token) == 3 and token[:2] == "##"
    )


def _untrained(training: Training, vocab_size: int, first: Sequence[str]) -> tuple[Any, Any]:
    """A tokenizer, and its trainer; `first` are the tokens behind the special ones."""
    installed("tokenizers", "training", "'libai_data[text]'")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    known: dict[str, Any] = {
        "vocab_size": vocab_size,
        "min_frequency": training.min_frequency,
        "special_tokens": [*training.special_tokens(), *first],
        "show_progress": False,
    }
    if training.model == BPE:
        # So that every text can be encoded, whatever bytes the corpus has.
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        return as_gpt2(Tokenizer(models.BPE())), trainers.BpeTrainer(initial_alphabet=alphabet, **known)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    return as_bert(tokenizer, training.lower_case), trainers.WordPieceTrainer(**known)
