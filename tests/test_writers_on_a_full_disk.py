"""What writes a file says so when the disk is full, leaves nothing unfinished, and can write it when there is room."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from omegaconf import OmegaConf

from libai_data.commands import main
from libai_data.commands.conversion.conversion import Conversion, convert
from libai_data.config.lazy_config import LazyConfig
from libai_data.data.sources.indexed_writer import IndexedWriter
from libai_data.data.text.preprocessing import preprocess
from libai_data.data.text.shards import Task
from libai_data.data.text.tokenizer import TokenizerFiles
from libai_data.data.text.tokenizer_training import Training, train_tokenizer
from tests.data.sources.record_files import texts as records
from tests.data.sources.record_files import write
from tests.data.text.corpora import texts, write_json_lines
from tests.full_disk import fill, resize, small_disk
from tests.properties import few_of

KILOBYTES = 8  # less than any of the files has


def config(inputs: Path, disk: Path) -> None:
    LazyConfig.save(OmegaConf.create({"text": "x" * 20_000}), str(disk / "config.yaml"))


def tokens(inputs: Path, disk: Path) -> None:
    with IndexedWriter(disk / "tokens") as writer:
        for _ in range(20):
            writer.add_document([np.arange(500)])


def tokens_without_room_for_the_index(inputs: Path, disk: Path) -> None:
    with IndexedWriter(disk / "tokens") as writer:
        for _ in range(2000):
            writer.add_document([[1]])


def tokenizer(inputs: Path, disk: Path) -> None:
    corpus_file = write_json_lines(inputs / "corpus.jsonl", texts(50))
    train_tokenizer([str(corpus_file)], str(disk / "tokenizer.json"), Training(vocab_size=500))


def preprocessed(inputs: Path, disk: Path) -> None:
    corpus_file = inputs / "documents.jsonl"
    if not corpus_file.exists():  # A part belongs to the time of its input.
        tokenizer(inputs, inputs)
        write_json_lines(corpus_file, texts(2000))
    preprocess([str(corpus_file)], str(disk / "out"), Task(TokenizerFiles(str(inputs / "tokenizer.json"))))


def shards(kind: str) -> Callable[[Path, Path], None]:
    def write_shards(inputs: Path, disk: Path) -> None:
        if not (inputs / "a.jsonl").exists():  # So does a shard.
            write("jsonl", inputs / "a.jsonl", records(300))
        convert(Conversion([str(inputs / "a.jsonl")], kind, disk, records_per_shard=200))

    return write_shards


WRITERS: dict[str, Callable[[Path, Path], Any]] = {
    "config": config,
    "tokens": tokens,
    "index of tokens": tokens_without_room_for_the_index,
    "tokenizer": tokenizer,
    "corpus": preprocessed,
    **{kind: shards(kind) for kind in ("webdataset", "parquet", "array_record")},
}


@pytest.mark.parametrize("kind", few_of(WRITERS, "config", "corpus", "webdataset"))
def test_a_full_disk_is_named_and_leaves_nothing_unfinished(kind: str, tmp_path: Path) -> None:
    if kind == "array_record":
        pytest.importorskip("array_record")
    write_files = WRITERS[kind]
    for name in ("inputs", "elsewhere"):
        (tmp_path / name).mkdir()
    with small_disk(tmp_path / "disk", KILOBYTES) as disk:
        with pytest.raises(Exception, match="No space left on device") as caught:
            write_files(tmp_path / "inputs", disk)
        assert str(disk) in str(caught.value)
        left = {path.name for path in disk.rglob("*") if path.is_file()}
        assert left <= {"lock", "plan.json"}, "what is unfinished still takes room"
        resize(disk, 8000)
        write_files(tmp_path / "inputs", disk)
        write_files(tmp_path / "inputs", tmp_path / "elsewhere")
        written = [
            {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
            for folder in (disk, tmp_path / "elsewhere")
        ]
    assert written[0].keys() == written[1].keys()
    assert kind == "array_record" or written[0] == written[1]


@pytest.mark.parametrize("kind", ["config", "tokens"])
def test_a_file_that_a_limit_keeps_small_is_named(kind: str, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (KILOBYTES << 10, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/{kind}"):
            WRITERS[kind](tmp_path, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def command(*arguments: str) -> Callable[[Path, Path], None]:
    def run(inputs: Path, target: Path) -> None:
        write("jsonl", inputs / "a.jsonl", records(30))
        tokens(inputs, inputs)
        filled_in = {"FOLDER": f"file://{inputs}", "TOKENS": f"{inputs}/tokens", "FILE": str(target)}
        assert main([filled_in.get(each, each) for each in arguments]) == 1

    return run


REPLACED: dict[str, Callable[[Path, Path], None]] = {
    "table.json": command("index", "FOLDER", "--format", "jsonl", "--output", "FILE"),
    "picture.svg": command("corpus", "TOKENS", "--picture", "FILE"),
    "page.html": command("inspect", "tests/engine/tiny_config.py", "--ranks", "1", "--output", "FILE"),
    "config.yaml": lambda inputs, target: config(inputs, target.parent),
    "tokenizer.json": lambda inputs, target: tokenizer(inputs, target.parent),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_a_full_disk_has_no_room_for_leaves_the_file_before(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    with small_disk(tmp_path / "disk", 64) as disk:
        target = disk / name
        target.write_bytes(b"before")
        fill(disk)
        told = ""
        try:
            REPLACED[name](inputs, target)
        except OSError as error:
            told = str(error)
        assert f"No space left on device: '{target}'" in told + capsys.readouterr().err
        assert target.read_bytes() == b"before"
        assert not list(disk.glob("*unfinished"))
