"""Shards: what the tokens of one part of a corpus are kept in until all parts are there, and who writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.shard_work.folder import write_json
from libai_data.data.shard_work.process_pool import Work, WorkError, done_by_processes
from libai_data.data.sources.indexed_writer import IndexedWriter, dtype_for
from libai_data.data.text.documents import BadLine, Document, count_lines, read_piece
from libai_data.data.text.files import PARQUET
from libai_data.data.text.parts import LINE, Part
from libai_data.data.text.sentences import split_sentences
from libai_data.data.text.tokenizer import TextTokenizer, TokenizerFiles

_CHARACTERS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Task:
    """How documents become tokens.

    Args:
        tokenizer: the files of the tokenizer.
        keys: of JSON objects, or columns; each becomes a dataset of its own.
        documents: what is one document of plain text; see `parts.Cutting`.
        split_sentences: whether a document is a list of sentences.
        keep_newlines: whether sentences keep the white space behind them.
        append_eod: whether each document ends with the tokenizer's end-of-document token.
    """

    tokenizer: TokenizerFiles
    keys: tuple[str, ...] = ("text",)
    documents: str = LINE
    split_sentences: bool = False
    keep_newlines: bool = False
    append_eod: bool = False


@dataclass
class ShardReport:
    """What became of a part.

    Args:
        documents: written.
        empty: documents without a token, which are left out.
        characters: of text.
        tokens: key -> how many.
        pieces: of each piece its file, and how many lines (of Parquet: rows) it has.
        bad: number of the piece, line within it (0: the file itself), reason.
        sizes: bytes of each file of the shard, by its name.
    """

    documents: int = 0
    empty: int = 0
    characters: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    pieces: list[tuple[str, int]] = field(default_factory=list)
    bad: list[tuple[int, int, str]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)


class TokenizingError(WorkError):
    """A process could not tokenize a part of a corpus."""


def tokenize_parts(
    folder: Path, parts: Iterable[Part], task: Task, workers: int
) -> Iterator[tuple[Part, ShardReport]]:
    """Write the shard of each part, by so many processes; gives each part with its report, as they are finished.

    Raises:
        TokenizingError: A process failed over a part, or died over it again and again.
    """
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
    """Where the shard of a part lies.

    Args:
        folder: of all shards.
        number: of the part.
        key: number of the key.
    """
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
    """Tokenize a part, and write its shard; the report is written last, so that what has a report is complete.

    Args:
        folder: of all shards.
        part: of the corpus.
        task: how.
        tokenizer: that of the task, loaded.
    """
    report = ShardReport(tokens=dict.fromkeys(task.keys, 0))
    dtype = dtype_for(len(tokenizer))
    end = [tokenizer.eod_token_id] if task.append_eod else []
    prefixes = [shard_prefix(folder, part.number, key) for key in range(len(task.keys))]
    writers = [IndexedWriter(prefix, dtype) for prefix in prefixes]
    try:
        for batch in _batches(part, task, report):
            for number, (key, writer) in enumerate(zip(task.keys, writers)):
                sequences = [_sequences(document.texts[number], task) for document in batch]
                report.tokens[key] += _write(writer, sequences, tokenizer, end, report, number == 0)
        for writer in writers:
            writer.close()
    finally:
        for writer in writers:
            writer.discard()
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            report.sizes[prefix.name + suffix] = os.path.getsize(f"{prefix}{suffix}")
    write_json(folder / f"{part.number:08d}.json", asdict(report))
    return report


def _batches(part: Part, task: Task, report: ShardReport) -> Iterator[list[Document]]:
    """Documents, as many as are tokenized at once; what else a part holds goes into the report."""
    batch: list[Document] = []
    characters = 0
    for number, piece in enumerate(part.pieces):
        rows = 0
        for record in read_piece(piece, task.keys, task.documents):
            rows = max(rows, record.line)
            if isinstance(record, BadLine):
                report.bad.append((number, *record))
                continue
            batch.append(record)
            characters += sum(map(len, record.texts))
            if characters >= _CHARACTERS_AT_ONCE:
                yield batch
                report.characters += characters
                batch, characters = [], 0
        report.pieces.append((piece.path, rows if piece.format == PARQUET else count_lines(piece)))
    if batch:
        yield batch
        report.characters += characters


def _sequences(text: str, task: Task) -> list[str]:
    return split_sentences(text, task.keep_newlines) if task.split_sentences else [text]


def _write(
    writer: IndexedWriter,
    documents: Sequence[Sequence[str]],
    tokenizer: TextTokenizer,
    end: Sequence[int | None],
    report: ShardReport,
    counts: bool,
) -> int:
    """Write documents of one key; returns the number of tokens."""
    encoded = tokenizer.encode_batch([text for document in documents for text in document])
    place = total = 0
    for document in documents:
        sequences = [ids for ids in encoded[place : place + len(document)] if ids]
        place += len(document)
        if sequences and end:
            sequences[-1] = [*sequences[-1], *end]  # type: ignore[list-item]
        if sequences:
            writer.add_document([np.array(ids, dtype=writer.dtype) for ids in sequences])
            total += sum(map(len, sequences))
        if counts:
            report.documents += bool(sequences)
            report.empty += not sequences
    return total
