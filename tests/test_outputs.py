"""What is written to a disk of this machine cannot be an address; it does not become a local folder of this name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Callable

import pytest

from libai_data.commands import corpus, inspect
from libai_data.commands.conversion.conversion import Conversion
from libai_data.config import LazyConfig
from libai_data.data.datasets import MNISTDataset
from libai_data.data.sources import ImageFolderSource, IndexedWriter
from libai_data.data.sources.record_index import index_folder
from libai_data.data.text import Training, preprocess, train_tokenizer
from libai_data.engine.checkpoint import Checkpointer
from libai_data.engine.writers import JSONWriter, TensorboardXWriter
from libai_data.errors import ConfigError
from libai_data.launch.launcher import parse_args
from libai_data.loader.failures import ErrorPolicy
from tests import full_disk
from tools import benchmark, prepare_digits, prepare_stdlib

NOTHING: Any = None
# Inputs and settings are missing: outputs are checked first.
ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "output of convert": lambda path: Conversion(["none.jsonl"], "parquet", path),
    "output of train_tokenizer": lambda path: train_tokenizer(["none.jsonl"], path, Training()),
    "output_prefix": lambda path: preprocess(["none.jsonl"], path, NOTHING),
    "prefix": IndexedWriter,
    "cache_dir": lambda path: index_folder(path, None, ""),
    "cache_dir of a folder": lambda path: ImageFolderSource("none", cache_dir=path),
    "quarantine_file": lambda path: ErrorPolicy("quarantine", path),
    "save_dir": lambda path: Checkpointer(None, path),
    "json_file": JSONWriter,
    "log_dir": TensorboardXWriter,
    "filename": lambda path: LazyConfig.save({}, path),
    "root of a download": lambda path: MNISTDataset(root=path, download=True),
}
COMMANDS: dict[str, Callable[[str], Any]] = {
    "--output": lambda path: inspect.main(["none.py", "--output", path]),
    "--picture": lambda path: corpus.main(["none", "--picture", path]),
    "--logdir": lambda path: parse_args(["--logdir", path, "train"]),
    "--json": lambda path: benchmark.main(["loader", "--json", path]),
    "root": lambda path: prepare_digits.main([path]),
    "folder": lambda path: prepare_stdlib.main([path]),
}


@pytest.mark.parametrize(
    "path",
    ["s3://bucket/x.svg", Path("s3://bucket/x.svg"), "file:///x.svg", "./s3://bucket/x.svg", "~/x.svg"],
    ids=["address", "address as a Path", "file", "address below a folder", "home"],
)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_is_written_to_is_a_path_on_this_machine(
    name: str, path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = f"{name.split()[0]} is {path!r}; it must be a path "
    with pytest.raises(ConfigError, match=re.escape(words)):
        ARGUMENTS[name](path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["s3://bucket/x.svg", "~/x.svg"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_refuses_an_output_that_is_no_path_on_this_machine_before_any_work(
    name: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        COMMANDS[name](path)
    assert f"argument {name}: '{path}' must be a path " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


FILES = ("output of train_tokenizer", "quarantine_file", "json_file", "filename")


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_place_of_a_file_to_write_is_refused_before_any_work(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name.split()[0]} is .*; it must be a path of a file on this machine"):
        ARGUMENTS[name](tmp_path)


@pytest.mark.parametrize("name", ["--output", "--picture", "--json"])
def test_a_command_refuses_a_folder_in_place_of_a_file_to_write(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        COMMANDS[name](str(tmp_path))
    assert "must be a path of a file on this machine (no folder" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_be_written_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    with full_disk.small_disk(tmp_path / "disk", 100) as disk:
        full_disk.forbid_writing(disk)
        for path in (disk / "t.json", disk / "new" / "folder" / "t.json"):
            with pytest.raises(ConfigError, match=f"output is {path}, but nothing can be written in {disk}; give"):
                train_tokenizer(["none.jsonl"], str(path), Training())


@pytest.mark.parametrize("path", ["a:b/c", "./~/x", "/tmp/x~", "über"])
def test_unusual_paths_of_this_machine_are_no_addresses(path: str) -> None:
    assert str(index_folder(path, None, "")) == str(Path(path))


def test_a_file_never_replaces_a_device_or_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=f"{path} is a device, a pipe or a socket, .* give another path"):
        LazyConfig.save({}, path)
    assert path.is_fifo()
