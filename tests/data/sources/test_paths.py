"""Paths that lead nowhere, or are none: each source, dataset and writer refuses them by an error that says why."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from libai_data.data.datasets import (
    BertDataset,
    CIFAR10Dataset,
    GPTDataset,
    ImageFolderDataset,
    ImageNetDataset,
    MNISTDataset,
)
from libai_data.data.sources import IndexedWriter, JsonLinesSource, LocalFile, NumpySource, listed, merge_indexed
from libai_data.data.sources.image_folder import ImageFolderSource
from libai_data.data.sources.paths import text_of, why_missing
from libai_data.data.sources.storage import cache_home
from libai_data.data.text.files import find_inputs
from libai_data.data.text.tokenizer import TokenizerFiles
from libai_data.errors import ConfigError, FormatError
from tests.data.datasets.sentence_corpora import Tokenizer
from tests.data.sources.record_files import ENDINGS, SOURCES, available
from tests.data.sources.record_files import write as write_records

LONG = "x" * 300
NOT_PATHS: list[Any] = [5, 2.5, True, b"x", {"a": "b"}, {"x"}, object(), [None], [b"x"], [["a"]], ["a\0"], "a\0b", ""]
NOT_ONE_PATH: list[Any] = [None, [], ["a"], iter(["a"])]
NOWHERE = [LONG, "/" + "x/" * 3000, "~/nothing", "nothing/*.x", "rel/ative", "[", "/dev/null", "/dev/null/x", " "]


def bert(path: Any) -> Any:
    return BertDataset("train", tokenizer=Tokenizer(), data_prefix=path)


ONE_PATH: dict[str, Callable[[Any], Any]] = {
    "cifar": CIFAR10Dataset,
    "mnist": MNISTDataset,
    "imagenet": ImageNetDataset,
    "image folder": ImageFolderDataset,
    "indexed": lambda path: GPTDataset(path, 4),
    "sentences": bert,
    "local file": LocalFile,
    "tokenizer": TokenizerFiles,
}
SEVERAL: dict[str, Callable[[Any], Any]] = {
    **SOURCES,
    "text": find_inputs,
    "numpy by field": lambda paths: NumpySource({"x": paths}),
}


@pytest.mark.parametrize("name", [*ONE_PATH, *SEVERAL])
def test_what_leads_to_no_file_is_refused_and_shown(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("array_record")
    monkeypatch.chdir(tmp_path)
    for path in NOWHERE:
        with pytest.raises(ConfigError, match=r"there is no|no file is named by") as told:
            {**ONE_PATH, **SEVERAL}[name](path)
        assert path[:20].strip() in str(told.value)
    for path in [*NOT_PATHS, *(NOT_ONE_PATH if name in ONE_PATH else [])]:
        if isinstance(path, dict) and name == "numpy":
            continue  # fields
        with pytest.raises(
            ConfigError, match=r"must be a (text or a )?path|must be a file, a glob or a folder|give data_prefix"
        ):
            {**ONE_PATH, **SEVERAL}[name](path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", [None, 5, b"x", "", "a\0b", LONG, "/dev/null/x"])
def test_what_cannot_be_written_is_refused(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([np.arange(3)])
    for write in (IndexedWriter, lambda to: merge_indexed([tmp_path / "a"], to)):
        with pytest.raises(ConfigError, match=r"prefix is .* must be a path|no files can be written at"):
            write(path)
    with pytest.raises(ConfigError, match="prefixes is"):
        merge_indexed(path, tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("path", [5, b"x", "a\0b"])
def test_a_cache_folder_that_is_no_path_is_refused(path: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "0.png").touch()
    for source, file in ((JsonLinesSource, "a.jsonl"), (ImageFolderSource, "images")):
        with pytest.raises(ConfigError, match=r"cache_dir is .* must be"):
            source(tmp_path / file, cache_dir=path)


def test_the_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    names = ("folder", "link", "file", "pipe", "file/x", LONG, "nothing")
    told = [why_missing(tmp_path / name) for name in names]
    assert told == [
        " (a folder has this path)",
        " (this path is a link whose target does not exist)",
        " (a file has this path)",
        " (a pipe, socket or device has this path)",
        " (Not a directory)",
        " (File name too long)",
        "",
    ]
    assert why_missing("~/data") == " ('~' is not expanded here; give the whole path)"
    with pytest.raises(ConfigError, match=r"x-\{0..3\}.jsonl' \(braces are not expanded here; give a glob"):
        listed(tmp_path / "x-{0..3}.jsonl")


@pytest.mark.parametrize("kind", [*SOURCES, "images"])
def test_a_relative_path_stays_when_the_process_changes_its_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind != "images":
        available(kind)
    for name, text in (("one", "a"), ("two", "b")):
        folder = tmp_path / name
        (folder / "class").mkdir(parents=True)
        (folder / "class" / "0.png").write_text(text)
        if kind != "images":
            write_records(kind, folder / f"data.{ENDINGS[kind]}", [text])
    monkeypatch.chdir(tmp_path / "one")
    path = "." if kind == "images" else f"data.{ENDINGS[kind]}"
    source = ImageFolderSource(path) if kind == "images" else SOURCES[kind](path)
    monkeypatch.chdir(tmp_path / "two")
    for opened in (pickle.loads(pickle.dumps(source)), source):
        found = opened.read(0)[0] if kind == "images" else opened[0]
        assert "a" in repr(found) and "'b'" not in repr(found)


def test_folders_are_read_through_links_each_of_them_once(tmp_path: Path) -> None:
    for folder in ("data", "data/.hidden", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a").touch()
    (tmp_path / "data" / ".b").touch()
    for number in (1, 2):
        (tmp_path / "data" / f"link{number}").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path / "data")
    assert listed(tmp_path / "data") == [str(tmp_path / "data" / name) for name in ("a", "link1/a")]


def test_a_link_to_a_file_that_is_read_too_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_records("jsonl", tmp_path / name, [name])
    assert len(JsonLinesSource(tmp_path)) == 2 and not caplog.records
    (tmp_path / "c.jsonl").symlink_to("a.jsonl")
    assert len(JsonLinesSource(tmp_path)) == 3
    [message] = [record.getMessage() for record in caplog.records]
    assert f"['{tmp_path}/a.jsonl', '{tmp_path}/c.jsonl'] are one file, so its records are read 2 times" in message


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").symlink_to("nowhere")
    for pattern in (tmp_path, tmp_path / "*"):
        with pytest.raises(ConfigError, match=r"/b is a link whose target does not exist"):
            listed(pattern)


def test_several_files_may_come_from_a_generator_and_an_address_is_no_path_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert listed(path for path in [tmp_path / "a"]) == [str(tmp_path / "a")]  # type: ignore[arg-type]
    for refuse in (CIFAR10Dataset, MNISTDataset, lambda path: GPTDataset(path, 4)):
        with pytest.raises(ConfigError, match=r"'s3://bucket/data', an address in a store; copy"):
            refuse("s3://bucket/data")


def test_a_text_file_of_another_encoding_is_refused_with_the_offset(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc \xe4")
    with pytest.raises(FormatError, match=r"a.txt at offset 4: no text in UTF-8"):
        text_of(tmp_path / "a.txt")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIBAI_DATA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**30)
    with pytest.raises(ConfigError, match=r"no home directory.*set LIBAI_DATA_CACHE_DIR"):
        cache_home()


def test_a_file_that_patterns_name_by_several_paths_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").touch()
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    assert listed(["data/a", tmp_path / "data/a", "./data/../data/a", "link/a", "data/*", "data"]) == ["data/a"]
    assert listed(tmp_path / "**" / "a") == [str(tmp_path / "data" / "a")]
