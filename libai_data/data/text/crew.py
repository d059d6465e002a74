"""Processes that tokenize the parts of a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from libai_data.data.shard_work.crew import Work, WorkError, done_by_processes
from libai_data.data.text.parts import Part
from libai_data.data.text.shards import ShardReport, Task, write_shard
from libai_data.data.text.tokenizer import TextTokenizer

Shard = tuple[Part, ShardReport]


class TokenizingError(WorkError):
    """A process could not tokenize a part of a corpus."""


def tokenize_parts(folder: Path, parts: Iterable[Part], task: Task, workers: int) -> Iterator[Shard]:
    """Write the shard of each part.

    Args:
        folder: of the shards.
        parts: taken as they are needed.
        task: how.
        workers: processes; 0 does it in this one.

    Returns:
        Each part with what became of it, as they are finished.

    Raises:
        TokenizingError: A process failed over a part, or died over it again and again.
    """
    tokenize = _Tokenize(folder, task)
    if not workers:
        for part in parts:
            yield part, tokenize(part)
        return

    def name(part: Part) -> str:
        return f"part {part.number} ({names_of_files(part)})"

    yield from done_by_processes(Work(tokenize, name, TokenizingError), parts, workers)


class _Tokenize:
    """Writes the shard of a part, by a tokenizer that is loaded once in each process."""

    def __init__(self, folder: Path, task: Task) -> None:
        self._folder, self._task = folder, task
        self._tokenizer: TextTokenizer | None = None

    def __call__(self, part: Part) -> ShardReport:
        if self._tokenizer is None:
            self._tokenizer = self._task.tokenizer.load()
        return write_shard(self._folder, part, self._task, self._tokenizer)


def names_of_files(part: Part) -> str:
    """The files of a part, the first few of them."""
    names = list(dict.fromkeys(piece.path for piece in part.pieces))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
