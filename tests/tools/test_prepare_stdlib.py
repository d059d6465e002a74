"""The standard library as a corpus, and the unigram level on it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from libai_data.data.sources import IndexedSource, IndexedWriter
from tools.prepare_stdlib import write_stdlib_corpus
from tools.unigram import main, unigram_perplexity


def library(folder: Path, files: int = 200) -> Path:
    for number in range(files):
        path = folder / ("package" if number % 3 else "") / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"value = {number}  # é\n", encoding="utf-8")
    for left_out in ("test/test_a.py", "site-packages/b.py", "package/__pycache__/c.py"):
        (folder / left_out).parent.mkdir(parents=True, exist_ok=True)
        (folder / left_out).write_text("no = 1\n")
    (folder / "latin.py").write_bytes(b"# \xe9\n")
    (folder / "empty.py").write_text("\n")
    return folder


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_source_file_is_one_document_of_one_part_the_same_each_time(tmp_path: Path) -> None:
    stdlib = library(tmp_path / "lib")
    counts = write_stdlib_corpus(tmp_path / "a", stdlib)
    train, test = (texts(tmp_path / "a" / f"{part}.jsonl") for part in ("train", "test"))
    assert sorted(train + test) == sorted(f"value = {number}  # é\n" for number in range(200))
    assert counts == {"train": len(train), "test": len(test)}
    assert 1 <= len(test) <= 20
    write_stdlib_corpus(tmp_path / "b", stdlib)
    for part in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / "a" / part).read_bytes() == (tmp_path / "b" / part).read_bytes()


def test_the_unigram_perplexity_is_that_of_its_definition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    tokens = {part: random.integers(0, 9, 300) ** 2 // 9 for part in ("train", "test")}
    for part, values in tokens.items():
        with IndexedWriter(tmp_path / part) as writer:
            writer.add_document([values])
    counts = [1 + tokens["train"].tolist().count(token) for token in range(8)]
    logs = [math.log(counts[token] / sum(counts)) for token in tokens["test"].tolist()]
    expected = math.exp(-sum(logs) / len(logs))
    found = unigram_perplexity(IndexedSource(tmp_path / "train"), IndexedSource(tmp_path / "test"))
    assert found == pytest.approx(expected)
    main([str(tmp_path / "train"), str(tmp_path / "test")])
    assert f"{expected:.1f}" in capsys.readouterr().out
