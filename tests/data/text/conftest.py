"""A tokenizer for all tests of text, and one worker that is no process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from libai_data.data.text import preprocessing
from libai_data.data.text.parts import Part
from libai_data.data.text.shards import ShardReport, Task, WriteShards, tokenize_parts
from tests.data.text.corpora import bpe_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a small byte-level BPE; who changes the file copies it."""
    return bpe_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def one_worker_works_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes for several workers alone: with one, tests ask for what does not depend on who works."""

    def tokenize(folder: Path, parts: Iterable[Part], task: Task, workers: int) -> Iterator[tuple[Part, ShardReport]]:
        if workers > 1:
            yield from tokenize_parts(folder, parts, task, workers)
        else:
            write = WriteShards(folder, task)
            yield from ((part, write(part)) for part in parts)

    monkeypatch.setattr(preprocessing, "tokenize_parts", tokenize)
