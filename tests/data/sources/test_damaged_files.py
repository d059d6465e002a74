"""Files of every source, damaged in every way: each ends in records or in an error that names the file."""

from __future__ import annotations

import gzip
import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np
import pytest

from libai_data.data.datasets import ImageFolderDataset
from libai_data.data.sources import (
    CIFAR10,
    CIFAR100,
    MNIST,
    ArrowSource,
    CIFARSource,
    ImageNetTarSource,
    IndexedSource,
    IndexedWriter,
    InMemorySource,
    JsonLinesSource,
    MNISTSource,
    NumpySource,
)
from libai_data.errors import DataPipelineError
from tests.data.sources import litdata_files
from tests.data.sources.published_files import jpeg, tar_of, write_cifar10, write_cifar100, write_mnist
from tests.data.sources.record_files import ENDINGS, SOURCES, WRITERS, put, texts, write
from tests.deadline import stretched
from tests.properties import examples

pytest.importorskip("array_record")
pyarrow = pytest.importorskip("pyarrow")
if find_spec("webdataset") is None:  # Its import takes a second.
    pytest.skip("not installed: webdataset", allow_module_level=True)


LINKS = ("leads_nowhere", "/dev/null", "/dev/zero")


class Kind(NamedTuple):
    """A source: `make` writes files into a folder and returns those to damage."""

    make: Callable[[Path], list[Path]]
    open: Callable[[Path], Any]


def of_records(kind: str) -> Kind:
    def make(folder: Path) -> list[Path]:
        write(kind, folder / f"a.{ENDINGS[kind]}", texts(8))
        return [folder / f"a.{ENDINGS[kind]}"]

    return Kind(make, lambda folder: SOURCES[kind](folder / f"a.{ENDINGS[kind]}"))


def npz(save: Callable[..., None]) -> Kind:
    def make(folder: Path) -> list[Path]:
        save(folder / "a.npz", x=np.arange(30), y=np.arange(90).reshape(30, 3))
        return [folder / "a.npz"]

    return Kind(make, lambda folder: NumpySource(folder / "a.npz"))


def arrow_file(folder: Path) -> list[Path]:
    table = pyarrow.table({"a": list(range(20)), "b": [str(number) for number in range(20)]})
    with pyarrow.OSFile(str(folder / "a.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return [folder / "a.arrow"]


def described(kind: str, compress: bool, *names: str) -> Kind:
    def make(folder: Path) -> list[Path]:
        WRITERS[kind](folder / f"a.{ENDINGS[kind]}", texts(8), compress)
        return [folder / name for name in names]

    return Kind(make, SOURCES[kind])


def written_by_litdata(name: str) -> Kind:
    def make(folder: Path) -> list[Path]:
        litdata_files.unpack(folder)
        return [folder / name / "chunk-0-0.bin"]

    return Kind(make, lambda folder: SOURCES["litdata"](folder / name))


def saved_dataset(folder: Path) -> list[Path]:
    write("arrow", folder / "data.arrow", texts(8))
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    return [folder / "data.arrow", folder / "state.json"]


def indexed(folder: Path) -> list[Path]:
    with IndexedWriter(folder / "a", np.uint16) as writer:
        for number in range(6):
            writer.add_document([np.arange(5) + number, np.arange(3)])
    return [folder / "a.bin", folder / "a.idx"]


def imagenet(folder: Path) -> list[Path]:
    classes = {f"n{label}.tar": tar_of({f"n{label}_{image}.JPEG": jpeg(image) for image in (1, 2)}) for label in "34"}
    names = ("ILSVRC2012_img_val.tar", "imagenet_2012_validation_synset_labels.txt", "ILSVRC2012_img_train.tar")
    (folder / names[0]).write_bytes(tar_of({f"val_{image}.JPEG": jpeg(image) for image in range(3)}))
    (folder / names[1]).write_text("n3\nn4\nn3\n")
    (folder / names[2]).write_bytes(tar_of(classes))
    return [folder / name for name in names]


def image_folder(folder: Path) -> list[Path]:
    for label in "ab":
        (folder / label).mkdir()
        (folder / label / "0.jpg").write_bytes(jpeg(7))
    return [folder / "a" / "0.jpg"]


def cifar(write_files: Callable[[Path], Path], *names: str) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        written = write_files(folder)
        return [written / name for name in names]

    return make


def mnist(compressed: bool) -> Kind:
    def make(folder: Path) -> list[Path]:
        raw = write_mnist(folder / "MNIST" / "raw", compressed)
        return [raw / f"train-{name}-ubyte{'.gz' * compressed}" for name in ("images-idx3", "labels-idx1")]

    return Kind(make, lambda folder: MNISTSource(folder, MNIST))


KINDS = {
    **{kind: of_records(kind) for kind in SOURCES},
    "npz": npz(np.savez),
    "compressed npz": npz(np.savez_compressed),
    "arrow file": Kind(arrow_file, lambda folder: ArrowSource(folder / "a.arrow")),
    "index of mds": described("mds", False, "index.json"),
    "compressed mds": described("mds", True, "a.mds.zstd"),
    "index of litdata": described("litdata", False, "index.json"),
    "compressed litdata": described("litdata", True, "a.zstd.bin"),
    **{f"litdata {name}": written_by_litdata(name) for name in ("plain", "batch", "sample", "table")},
    "saved dataset": Kind(saved_dataset, ArrowSource),
    "indexed": Kind(indexed, lambda folder: IndexedSource(folder / "a")),
    "imagenet train": Kind(lambda folder: imagenet(folder)[2:], lambda folder: ImageNetTarSource(folder)),
    "imagenet val": Kind(lambda folder: imagenet(folder)[:2], lambda folder: ImageNetTarSource(folder, train=False)),
    "image folder": Kind(image_folder, ImageFolderDataset),
    "cifar10": Kind(
        cifar(write_cifar10, "data_batch_2.bin", "batches.meta.txt"), lambda folder: CIFARSource(folder, CIFAR10)
    ),
    "cifar100": Kind(
        cifar(write_cifar100, "train.bin", "fine_label_names.txt"), lambda folder: CIFARSource(folder, CIFAR100)
    ),
    "mnist": mnist(compressed=False),
    "gzipped mnist": mnist(compressed=True),
    "in memory": Kind(of_records("jsonl").make, lambda folder: InMemorySource(JsonLinesSource(folder / "a.jsonl"))),
}


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.note),)


def damaged(content: bytes, note: Path) -> Iterator[bytes]:
    """A file's content, damaged."""
    size, random = len(content), np.random.default_rng(3)
    yield from (content[:length] for length in {0, 1, 2, 4, 8, 20, size // 10, size // 2, size - 1})
    yield from (content + b"x", content + bytes(512), content * 2, bytes(size), b"\xff" * size, random.bytes(size))
    yield from (bytes(each ^ 0xFF for each in content[:8]) + content[8:], b"A text of some words.\n" * 20)
    yield from (pickle.dumps(Malicious(note)), pickle.dumps({b"labels": [1]}), b"<!DOCTYPE html><html>404</html>")
    yield from (gzip.compress(b"abc"), b"PK\x05\x06" + bytes(18), "ä".encode("latin-1"), "a b\n".encode("utf-16"))
    yield from (b'{"a": 1}\n[1]\nnull\n{"b"', b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"9" * 5000 + b"}\n")
    for places in (slice(4, 12), slice(16, 24), slice(20, 36)):  # where formats keep sizes
        for each in (b"\xff", b"\x7f", b"\0"):
            yield content[: places.start] + each * (places.stop - places.start) + content[places.stop :]
    for number in range(examples(60)):
        changed, place = bytearray(content), int(random.integers(min(size, 300) if number % 2 else size))
        changed[place] ^= 1 << int(random.integers(8))
        yield bytes(changed)
        changed[place : place + 8] = random.bytes(len(changed[place : place + 8]))
        yield bytes(changed)


def read_all(kind: Kind, folder: Path, damaged_file: Path) -> None:
    """Read what can be read; errors of other kinds than this package's come through."""
    try:
        source = kind.open(folder)
    except DataPipelineError as error:
        assert damaged_file.stem in str(error) or "state.json" in str(damaged_file), error
        return
    for index in range(len(source)):
        try:
            source.read(index) if hasattr(source, "read") else source[index]
        except DataPipelineError as error:
            assert damaged_file.stem in str(error), error


@contextmanager
def within_a_minute() -> Iterator[None]:
    def hung(*_: Any) -> None:
        raise TimeoutError("reading hangs")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(ceil(stretched(60)))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_ends_in_records_or_in_an_error_that_names_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    folder, kind = tmp_path / "files", KINDS[name]
    folder.mkdir()
    for path in kind.make(folder):
        whole = path.read_bytes()
        for content in damaged(whole, tmp_path / "was_run"):
            put(path, content)
            with within_a_minute():
                read_all(kind, folder, path)
        for replace in (os.mkdir, os.mkfifo, *(lambda to, what=what: os.symlink(what, to) for what in LINKS), None):
            path.unlink()
            if replace is not None:
                replace(path)
            with within_a_minute():
                read_all(kind, folder, path)
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            put(path, whole)
    assert not (tmp_path / "was_run").exists()
