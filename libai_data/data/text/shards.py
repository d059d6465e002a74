"""Shards: the files with the tokens of one part of a corpus, which are kept until all parts are tokenized."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.shard_work.process_pool import Work, WorkError, done_by_processes
from libai_data.data.shard_work.work_folder import write_json
from libai_data.data.sources.indexed_writer import IndexedWriter, dtype_for
from libai_data.data.text.documents import BadLine, Document, check_keys, count_lines, read_piece
from libai_data.data.text.files import PARQUET
from libai_data.data.text.parts import Part
from libai_data.data.text.sentences import pieces_of, split_sentences
from libai_data.data.text.tokenizer import TextTokenizer, TokenizerFiles
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import FILE_NAME, check_types, instance_of

_CHARACTERS_AT_ONCE = 1 << 20
_UNKNOWN = ("[UNK]", "<unk>")
LONGEST_TEXT = 1 << 20
"""Most characters of a text that is tokenized as a whole; a longer text is tokenized in pieces of at most so many."""


@dataclass(frozen=True)
class Task:
    """How documents become tokens.

    Args:
        tokenizer: the files of the tokenizer.
        keys: the keys of JSON objects, or columns, that hold text; each becomes a separate dataset.
        split_sentences: write each sentence as a sequence, for BERT, RoBERTa and T5.
        keep_newlines: keep the white space after each sentence.
        append_eod: whether each document ends with the tokenizer's end-of-document token.
        eod_token: the token that each document ends with, instead of the tokenizer's; "" for none.
        bos_token: the token that each document begins with; "" for none.
    """

    tokenizer: TokenizerFiles
    keys: tuple[str, ...] = ("text",)
    split_sentences: bool = False
    keep_newlines: bool = False
    append_eod: bool = False
    eod_token: str = ""
    bos_token: str = ""

    def __post_init__(self) -> None:
        check_types(Task, vars(self), {"tokenizer": instance_of(TokenizerFiles)})
        check_keys(self.keys)
        if not all(map(FILE_NAME.accepts, self.keys)):
            raise ConfigError(
                f"the keys of texts (--json-keys) are {list(self.keys)}; a key is a part of the name of its output "
                "file, so it has at least one character, and no '/'"
            )

    def ends(self, tokenizer: TextTokenizer) -> tuple[list[int], list[int]]:
        """The ids of the tokens that each document begins with, and ends with; at most one of each. A ConfigError if
        the tokenizer does not have the token, or has no token that ends documents."""
        begin = [tokenizer.id_of(self.bos_token)] if self.bos_token else []
        if self.eod_token:
            return begin, [tokenizer.id_of(self.eod_token)]
        if not self.append_eod:
            return begin, []
        if tokenizer.eod_token_id is None:
            raise ConfigError(
                f"{self.tokenizer.path} has no token that is known to end a document, such as <|endoftext|> or [SEP]; "
                "name it (--eod-token), or give the tokenizer's folder, if that has a tokenizer_config.json"
            )
        return begin, [tokenizer.eod_token_id]


@dataclass
class ShardReport:
    """The result of tokenizing a part."""

    documents: int = 0  # documents with a token, in at least one of the keys
    empty: int = 0  # documents without a token, or of white space alone, which are left out
    characters: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    unknown: int = 0  # tokens of all keys that stand for what the tokenizer does not know
    # For each piece: its file, and its number of lines (for Parquet: rows).
    pieces: list[tuple[str, int]] = field(default_factory=list)
    # Number of the piece, line within it (0: the file itself), reason.
    bad: list[tuple[int, int, str]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each file of the shard, by its name


class TokenizingError(WorkError):
    """A process could not tokenize a part of a corpus."""


def tokenize_parts(folder: Path, parts: Iterable[Part], task: Task, workers: int) -> Iterator[tuple[Part, ShardReport]]:
    """Write the shard of each part with `workers` processes; yields each part with its report when it is finished. A
    TokenizingError if a process failed to tokenize a part, or several processes died while they tokenized it."""
    yield from done_by_processes(Work(WriteShards(folder, task), name_of, TokenizingError), parts, workers)


class WriteShards:
    """Writes the shard of a part, by a tokenizer that is loaded once in each process."""

    def __init__(self, folder: Path, task: Task) -> None:
        self._folder, self._task = folder, task
        self._tokenizer: Any = None

    def __call__(self, part: Part) -> ShardReport:
        self._tokenizer = self._tokenizer or self._task.tokenizer.load()
        return write_shard(self._folder, part, self._task, self._tokenizer)


def name_of(part: Part) -> str:
    """The number of a part, and the first few of its files."""
    names = list(dict.fromkeys(piece.path for piece in part.pieces))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"part {part.number} ({', '.join(names[:3])}{more})"


def shard_prefix(folder: Path, number: int, key: int) -> Path:
    """The path of the shard of a part, for the key with number `key`, without its suffix."""
    return folder / f"{number:08d}-{key}"


def finished_shard(folder: Path, number: int) -> ShardReport | None:
    """The report of a part that has been tokenized completely, or None."""
    try:
        found = ShardReport(**json.loads((folder / f"{number:08d}.json").read_text(encoding="utf-8")))
        whole = all(os.path.getsize(folder / name) == size for name, size in found.sizes.items())
    except (OSError, ValueError, TypeError):
        return None
    return found if whole else None


def write_shard(folder: Path, part: Part, task: Task, tokenizer: TextTokenizer) -> ShardReport:
    """Tokenize a part, and write its shard; the report is written last, so that a shard with a report is complete."""
    report = ShardReport(tokens=dict.fromkeys(task.keys, 0))
    dtype = dtype_for(len(tokenizer))
    ends = task.ends(tokenizer)
    prefixes = [shard_prefix(folder, part.number, key) for key in range(len(task.keys))]
    with ExitStack() as finished_together:
        writers = [finished_together.enter_context(IndexedWriter(prefix, dtype)) for prefix in prefixes]
        for batch in _batches(part, task, report):
            has_tokens = np.zeros(len(batch), bool)
            for number, (key, writer) in enumerate(zip(task.keys, writers)):
                texts = [document.texts[number] for document in batch]
                sequences = [_sequences_of(text, task) for text in texts]
                report.tokens[key] += _write(writer, sequences, tokenizer, ends, report, has_tokens)
            report.documents += int(has_tokens.sum())
            report.empty += int((~has_tokens).sum())
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            report.sizes[prefix.name + suffix] = os.path.getsize(f"{prefix}{suffix}")
    write_json(folder / f"{part.number:08d}.json", asdict(report))
    return report


def _sequences_of(text: str, task: Task) -> list[str]:
    if task.split_sentences:
        return split_sentences(text, task.keep_newlines)
    return [] if text.isspace() else [text]


def _batches(part: Part, task: Task, report: ShardReport) -> Iterator[list[Document]]:
    """Yield the documents that are tokenized at once; bad lines, and counts, go into the report."""
    batch: list[Document] = []
    characters = 0  # of the batch
    for number, piece in enumerate(part.pieces):
        rows = 0
        for record in read_piece(piece, task.keys):
            rows = max(rows, record.line)
            if isinstance(record, BadLine):
                report.bad.append((number, *record))
                continue
            batch.append(record)
            characters += sum(map(len, record.texts))
            report.characters += sum(map(len, record.texts))
            if characters >= _CHARACTERS_AT_ONCE:
                yield batch
                batch, characters = [], 0
        report.pieces.append((piece.path, rows if piece.format == PARQUET else count_lines(piece)))
    if batch:
        yield batch


def _encoded(texts: Sequence[str], tokenizer: TextTokenizer, dtype: Any) -> Iterator[np.ndarray]:
    """The tokens of each text. Only so many characters are tokenized at once, because each needs 100 bytes or more."""
    of_texts = [list(pieces_of(text, LONGEST_TEXT)) for text in texts]
    pieces = [piece for own in of_texts for piece in own]
    ends = np.cumsum([len(piece) for piece in pieces]) // _CHARACTERS_AT_ONCE
    bounds = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(pieces)]
    tokens = (ids for start, stop in zip(bounds, bounds[1:]) for ids in tokenizer.encode_batch(pieces[start:stop]))
    for own in of_texts:
        yield np.concatenate([np.array(next(tokens), dtype) for _ in own])


def _write(
    writer: IndexedWriter,
    documents: Sequence[Sequence[str]],
    tokenizer: TextTokenizer,
    ends: tuple[list[int], list[int]],
    report: ShardReport,
    has_tokens: np.ndarray,
) -> int:
    """Write documents of one key, and mark in `has_tokens` those that have a token; returns the number of tokens."""
    texts = [text for document in documents for text in document]
    encoded = _encoded(texts, tokenizer, writer.dtype)
    begin, end = (np.array(ids, writer.dtype) for ids in ends)
    unknown = [tokenizer.get_vocab()[token] for token in _UNKNOWN if token in tokenizer.get_vocab()]
    total = 0
    for number, document in enumerate(documents):
        sequences = [ids for ids in islice(encoded, len(document)) if len(ids)]
        report.unknown += sum(int(np.count_nonzero(ids == ident)) for ids in sequences for ident in unknown)
        if sequences:
            sequences[0] = np.concatenate([begin, sequences[0]])
            sequences[-1] = np.concatenate([sequences[-1], end])
            writer.add_document(sequences)
            total += sum(map(len, sequences))
            has_tokens[number] = True
    return total
