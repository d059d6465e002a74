"""What is kept or shared belongs to the very files that it was made of, and to their content at that time."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import time
import types
from functools import partial
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from PIL import Image

from libai_data.commands.conversion.conversion import Conversion, convert
from libai_data.data.datasets.combine import ConcatDataset, Subset
from libai_data.data.datasets.fingerprint import fingerprint_of
from libai_data.data.datasets.gpt import GPTDataset
from libai_data.data.datasets.image_datasets import ImageFolderDataset
from libai_data.data.files import identity as identity_module
from libai_data.data.files.identity import file_identity
from libai_data.data.samplers.single_round import SingleRoundSampler
from libai_data.data.sources import (
    CIFAR10,
    MNIST,
    CIFARSource,
    ImageFolderSource,
    InMemorySource,
    JsonLinesSource,
    MNISTSource,
    NumpySource,
    open_source,
)
from libai_data.data.sources import mapped_file as mapped_file_module
from libai_data.errors import CheckpointError, ConfigError, FormatError
from libai_data.loader.batch_loader import BatchLoader
from libai_data.loader.same_dataset import fingerprint_with_samples
from libai_data.loader.shipping import ship, unship
from tests.data.datasets.gpt_corpora import write as write_corpus
from tests.data.sources.published_files import write_cifar10, write_mnist
from tests.data.sources.record_files import ENDINGS, SOURCES, available, same, texts, write


def in_memory(source: Any, name: str = "") -> list[Any]:
    return records_of(InMemorySource(source, name))


def records_of(memory: InMemorySource) -> list[Any]:
    return memory.read_many(range(len(memory)))


def pictures(root: Path, value: int) -> Path:
    """A folder of two images of one colour; all folders have the same names, and files of the same size."""
    for name in ("a/1.png", "b/2.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), value, np.uint8)).save(root / name)
    return root


def correct_in_place(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def replace(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.utime(new, ns=(1, 1))
    os.replace(new, path)


def lead_elsewhere(path: Path, content: bytes) -> None:
    new = path.parent.parent.parent / "elsewhere.png"
    new.write_bytes(content)
    path.unlink()
    path.symlink_to(new)


@pytest.mark.parametrize("correct", [correct_in_place, replace, lead_elsewhere])
def test_an_image_that_was_corrected_is_read_again_into_memory(
    tmp_path: Path, correct: Callable[[Path, bytes], None]
) -> None:
    root, other = pictures(tmp_path / "images", 1), pictures(tmp_path / "other", 2)
    source = open_source(root, "image_folder")
    kept = InMemorySource(source)
    content = (other / "b/2.png").read_bytes()
    assert len(content) == (root / "b/2.png").stat().st_size
    correct(root / "b/2.png", content)
    assert in_memory(open_source(root, "image_folder"))[1]["png"] == content != kept[1]["png"]


def test_folders_of_equal_names_are_not_taken_for_each_other(tmp_path: Path) -> None:
    first, second = pictures(tmp_path / "1/images", 1), pictures(tmp_path / "2/images", 2)
    (tmp_path / "link").symlink_to(tmp_path / "1")
    kept = InMemorySource(open_source(first, "image_folder"))
    assert InMemorySource(open_source(second, "image_folder"))[0] != kept[0]
    # Two paths to one folder share one memory, and a link that leads elsewhere later is another folder.
    through = InMemorySource(open_source(tmp_path / "link/images", "image_folder"))
    assert through._memory.number == kept._memory.number
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "2")
    assert InMemorySource(open_source(tmp_path / "link/images", "image_folder"))[0] != kept[0]


def test_a_change_after_a_file_was_identified_has_another_time_on_any_kernel(tmp_path: Path) -> None:
    # Older kernels take the times of files from a clock that runs in steps of up to 10 ms.
    path = pictures(tmp_path, 1) / "a/1.png"
    for identify in (lambda: file_identity(path), lambda: ImageFolderSource(tmp_path).identity):
        path.touch()
        identify()
        assert time.time_ns() - path.stat().st_mtime_ns > 10_000_000
    identity = file_identity(path)
    os.utime(path, ns=(1, time.time_ns() + 10**12))  # A server's clock is ahead: there is nothing to wait for.
    assert file_identity(path) != identity


def test_relative_paths_mean_the_files_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        expected = write("jsonl", Path("a.jsonl"), texts(5, seed=number))
        os.utime("a.jsonl", ns=(1, 1))
        found.append(InMemorySource(JsonLinesSource("a.jsonl")))
        assert records_of(found[-1]) == expected


def test_fashion_in_memory_is_not_mnist(tmp_path: Path) -> None:
    for folder in ("MNIST/raw", "FashionMNIST/raw"):
        write_mnist(tmp_path / folder)
    path = tmp_path / "FashionMNIST/raw/train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    digits, clothes = (open_source(tmp_path, kind) for kind in ("mnist", "fashion_mnist"))
    kept = InMemorySource(digits)
    assert in_memory(clothes) == list(clothes) != records_of(kept)


def test_a_name_does_not_make_other_sources_equal(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        write("jsonl", tmp_path / f"{name}.jsonl", texts(5, seed=number))
    first, second = (InMemorySource(JsonLinesSource(tmp_path / f"{name}.jsonl"), "v1") for name in "ab")
    assert records_of(first) != records_of(second)
    assert len(InMemorySource([b"1", b"2"], "v1")) == 2 and len(InMemorySource([b"1"], "v1")) == 1
    folders = [pictures(tmp_path / str(value), value) for value in (1, 2)]
    # Neither do a class and a length, of datasets that wrap other files, or other parts of them.
    first, second = (InMemorySource(ConcatDataset([ImageFolderDataset(folder)]), "v1") for folder in folders)
    assert first[0].images.tensor.max() != second[0].images.tensor.max()
    first, second = (InMemorySource(Subset(ImageFolderDataset(folders[0]), n, n + 1), "v1") for n in (0, 1))
    assert (int(first[0].labels.tensor), int(second[0].labels.tensor)) == (0, 1)


def test_indices_lie_where_the_user_or_the_environment_says_or_beside_the_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write("jsonl", tmp_path / name / "same.jsonl", texts(5))
        os.utime(tmp_path / name / "same.jsonl", ns=(1, 1))
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("a", "b"):
        JsonLinesSource(tmp_path / name / "same.jsonl")
    assert len(list((tmp_path / "cache/indices").glob("same.jsonl-*.npy"))) == 2
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["same.jsonl"]
    monkeypatch.delenv("LIBAI_DATA_CACHE_DIR")
    JsonLinesSource(tmp_path / "a/same.jsonl")
    assert len(list((tmp_path / "a/.libai_data_index").glob("*.npy"))) == 1
    assert len(JsonLinesSource(tmp_path / "a")) == 5, "indices are no shards"
    JsonLinesSource(tmp_path / "a/same.jsonl", cache_dir=tmp_path / "chosen")
    assert len(list((tmp_path / "chosen").glob("same.jsonl-*.npy"))) == 1
    # One that is beside the file already is used.
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "another"))
    JsonLinesSource(tmp_path / "a/same.jsonl")
    assert not (tmp_path / "another").exists()
    GPTDataset(write_corpus(tmp_path / "corpus", [[1, 2, 3], [4, 5]]), 2, shuffle_documents=True)
    assert len(list((tmp_path / "another/indices").glob("gpt-*.npy"))) == 1


def test_a_file_that_is_replaced_or_removed_stays_as_it_was_and_one_that_is_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_file_module, "_SECONDS_BETWEEN_CHECKS", -1.0)
    path = tmp_path / "a.jsonl"
    expected = write("jsonl", path, texts(9))
    content = path.read_bytes()
    source = JsonLinesSource(path)
    assert source[0] == expected[0]
    write("jsonl", tmp_path / "b", texts(9, seed=1))
    os.replace(tmp_path / "b", path)
    assert source[8] == expected[8]
    path.unlink()
    assert source[7] == expected[7]
    path.write_bytes(content)
    again = JsonLinesSource(path)
    assert again[0] == expected[0]
    path.write_bytes(content[::-1])
    os.utime(path, ns=(1, 1))
    with pytest.raises(FormatError, match=r"a.jsonl has changed since it was opened: it was FileStatus"):
        again[1]


def test_a_file_that_is_written_to_is_refused_before_the_batch_after_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(mapped_file_module, "time", types.SimpleNamespace(monotonic=lambda: now))
    path = tmp_path / "a.jsonl"
    expected = write("jsonl", path, texts(9))
    source = JsonLinesSource(path)
    assert source[0] == expected[0]
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content[::-1])
    now += 0.03
    for _ in range(2):  # A loader that skips a sample reads the next one at once.
        with pytest.raises(FormatError, match="has changed since it was opened"):
            source[1]


def test_workers_map_an_array_again_refuse_another_file_and_get_a_copy_of_a_removed_one(tmp_path: Path) -> None:
    content = np.zeros((10_000, 3), dtype=[("x", "<i4"), ("y", "<f8", 2)])
    content["x"] = np.arange(content.size).reshape(-1, 3)
    np.save(tmp_path / "a.npy", content)
    array = NumpySource(tmp_path / "a.npy")._shards[0].arrays["data"]
    shipment = ship(array)
    try:
        assert os.fstat(shipment.descriptor).st_size < content.nbytes / 10
        np.testing.assert_array_equal(unship(shipment.descriptor), content)
        np.save(tmp_path / "b.npy", content[::-1])
        os.utime(tmp_path / "b.npy", ns=(1, 1))
        os.replace(tmp_path / "b.npy", tmp_path / "a.npy")
        with pytest.raises(FormatError, match=r"a.npy has changed since it was opened"):
            unship(shipment.descriptor)
    finally:
        shipment.close()
    shipment = ship(array)  # Its file is another one now: what travels is the array itself.
    try:
        np.testing.assert_array_equal(unship(shipment.descriptor), content)
    finally:
        shipment.close()


def test_a_corpus_that_was_replaced_is_not_mixed_with_the_one_that_was_pickled(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [[1, 2, 3], [4, 5]])
    packed = pickle.dumps(GPTDataset(prefix, 2, shuffle_documents=True))
    assert len(pickle.loads(packed)) == 2
    write_corpus(prefix, [[5, 4, 3], [2, 1]])
    os.utime(f"{prefix}.bin", ns=(1, 1))
    with pytest.raises(FormatError, match=r"has changed since it was opened"):
        pickle.loads(packed)


def test_checkpoints_know_moved_data_again_and_changed_samples_if_they_hash_them(tmp_path: Path) -> None:
    root = pictures(tmp_path / "images", 1)
    prefix = write_corpus(tmp_path / "corpus/a", [[1, 2, 3], [4, 5]])
    found = []
    for folder, corpus in ((root, prefix), (tmp_path / "moved", tmp_path / "elsewhere/a")):
        if not folder.exists():
            shutil.copytree(root, folder)
            shutil.copytree(tmp_path / "corpus", tmp_path / "elsewhere")
        sets = [ImageFolderDataset(folder), GPTDataset(corpus, 2, shuffle_documents=True)]
        found.append([fingerprint_with_samples(dataset, 2) for dataset in sets])
    assert found[0] == found[1]
    correct_in_place(root / "b/2.png", (pictures(tmp_path / "other", 2) / "b/2.png").read_bytes())
    corrected = ImageFolderDataset(root)
    assert fingerprint_of(corrected) == fingerprint_of(sets[0])
    assert fingerprint_with_samples(corrected, 2) != found[0][0]
    assert ImageFolderSource(root).identity_of(0, 2) != ImageFolderSource(tmp_path / "moved").identity_of(0, 2)


@pytest.mark.parametrize("kind", ["mds", "litdata"])
def test_records_are_other_ones_if_their_index_renames_a_column(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path / f"a.{ENDINGS[kind]}", texts(3))
    before, index = open_source(tmp_path), tmp_path / "index.json"
    index.write_text(re.sub(r"\btext\b", "words", index.read_text()))
    after = open_source(tmp_path)
    assert "words" in after[0]
    assert after.identity != before.identity and after.identity_of(0, 3) != before.identity_of(0, 3)


@pytest.fixture
def by_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBAI_DATA_FILE_IDENTITY", "content")


def replace_unseen(path: Path, content: bytes) -> None:
    """Give a file other bytes of the same number, and its time of change again, as `rsync -t` and `cp -p` can."""
    before = path.stat()
    assert len(content) == before.st_size and content != path.read_bytes()
    replace(path, content)
    os.utime(path, ns=(1, before.st_mtime_ns))


@pytest.mark.usefixtures("by_content")
def test_with_digests_a_file_of_the_same_size_and_time_is_another_one_everywhere(tmp_path: Path) -> None:
    root, other = pictures(tmp_path / "images", 1), pictures(tmp_path / "other", 2)
    kept = InMemorySource(open_source(root, "image_folder"))
    command = Conversion([str(root)], "webdataset", tmp_path / "shards", "image_folder", records_per_shard=1)
    convert(command)
    dataset = ImageFolderDataset(root)
    state = BatchLoader(dataset, SingleRoundSampler(range(2), 1)).state_dict()

    replace_unseen(root / "b/2.png", (other / "b/2.png").read_bytes())
    assert in_memory(open_source(root, "image_folder"))[1] != kept[1]
    assert convert(command).kept == 1
    assert fingerprint_of(ImageFolderDataset(root)) == fingerprint_of(dataset)
    with pytest.raises(CheckpointError, match="dataset's files was"):
        BatchLoader(ImageFolderDataset(root), SingleRoundSampler(range(2), 1)).load_state_dict(state)

    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 22}\n')
    assert list(JsonLinesSource(path)) == [{"n": 1}, {"n": 22}]
    source = JsonLinesSource(path)  # maps the file when it is first read, since its index is kept
    replace_unseen(path, b'{"n": 22}\n{"n": 1}\n')
    with pytest.raises(FormatError, match="has changed since it was opened"):
        source[0]
    assert list(JsonLinesSource(path)) == [{"n": 22}, {"n": 1}]  # by another index


@pytest.mark.usefixtures("by_content")
def test_with_digests_moved_and_touched_files_are_the_same(tmp_path: Path) -> None:
    root = pictures(tmp_path / "images", 1)
    state = BatchLoader(ImageFolderDataset(root), SingleRoundSampler(range(2), 1)).state_dict()
    kept = InMemorySource(open_source(root, "image_folder"))
    shutil.move(root, tmp_path / "moved")
    (tmp_path / "moved/a/1.png").touch()
    BatchLoader(ImageFolderDataset(tmp_path / "moved"), SingleRoundSampler(range(2), 1)).load_state_dict(state)
    memory = InMemorySource(open_source(tmp_path / "moved", "image_folder"))
    assert memory._memory.number == kept._memory.number


@pytest.mark.usefixtures("by_content")
def test_with_digests_a_folder_is_listed_again_although_its_time_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libai_data.data.sources.image_folder._FEW_FILES", 0)
    root = pictures(tmp_path / "images", 1)
    for expected in (2, 3):
        for folder in (root, root / "a", root / "b"):
            os.utime(folder, ns=(0, 0))
        assert len(ImageFolderSource(root, cache_dir=tmp_path / "cache")) == expected
        shutil.copy(root / "a/1.png", root / "a/3.png")


@pytest.mark.usefixtures("by_content")
def test_a_process_digests_a_file_once_and_again_if_it_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"123")
    digested = identity_module._digest.cache_info().misses
    first = [file_identity(path) for _ in range(3)]
    assert first[0] == first[2] and identity_module._digest.cache_info().misses == digested + 1
    before = path.stat()
    with path.open("r+b") as file:  # the same inode
        file.write(b"456")
    os.utime(path, ns=(1, before.st_mtime_ns))
    assert file_identity(path) != first[0]


def test_an_unknown_kind_of_identity_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBAI_DATA_FILE_IDENTITY", "hash")
    with pytest.raises(ConfigError, match="LIBAI_DATA_FILE_IDENTITY is 'hash'; it must be 'time'"):
        file_identity(tmp_path)


def test_a_checkpoint_notices_other_files_and_another_order_of_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    names = [tmp_path / "data" / name for name in ("a.jsonl", "b.jsonl")]
    for number, path in enumerate(names):
        path.write_text("".join(f'{{"x": {10 * number + row}}}\n' for row in range(4)))
    shutil.copytree(tmp_path / "data", tmp_path / "moved")
    first = fingerprint_of(JsonLinesSource(names))
    assert fingerprint_of(JsonLinesSource([tmp_path / "moved" / path.name for path in names])) == first
    assert fingerprint_of(JsonLinesSource(names[::-1])) != first
    assert fingerprint_of(InMemorySource(JsonLinesSource(names[::-1]))) != fingerprint_of(
        InMemorySource(JsonLinesSource(names))
    )
    names[1].write_text('{"x": 1}\n' * 4)
    assert fingerprint_of(JsonLinesSource(names)) != first


def test_a_file_of_any_format_that_is_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file_module, "_SECONDS_BETWEEN_CHECKS", -1.0)
    readers: dict[Path, Callable[[], Any]] = {}
    for kind in ("webdataset", "parquet", "arrow", "jsonl", "numpy", "mds", "litdata"):
        available(kind)
        path = tmp_path / kind / f"a.{ENDINGS[kind]}"
        path.parent.mkdir()
        write(kind, path, texts(9))
        readers[path] = partial(SOURCES[kind](path).__getitem__, 3)
    prefix = write_corpus(tmp_path / "corpus", [[1, 2, 3], [4, 5, 6, 7]])
    corpus = GPTDataset(prefix, 2)
    out = {"input_ids": np.zeros((1, 2), np.int64)}
    readers[Path(f"{prefix}.bin")] = partial(corpus.read_batch, np.array([1]), out)
    arrays = NumpySource(tmp_path / "numpy" / "a.npy")
    cifar = CIFARSource(write_cifar10(tmp_path).parent, CIFAR10)
    readers[cifar.folder / "data_batch_2.bin"] = partial(cifar.read, 2)
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        mnist = MNISTSource(write_mnist(tmp_path / name / "MNIST/raw").parents[1], MNIST)
        readers[mnist.folder / name] = partial(mnist.read, 2)
    for path, read in readers.items():
        read()
        os.utime(path, ns=(1, 1))
        with pytest.raises(FormatError, match=rf"{path.name} has changed since it was opened"):
            read()
    with pytest.raises(FormatError, match=r"a.npy has changed since it was opened"):
        arrays.read_batch(np.array([1]), {"data": np.zeros((1, 310), np.uint8)})


@pytest.mark.parametrize("kind", ["numpy", "array_record"])
def test_a_worker_refuses_a_file_that_is_written_to_and_that_it_does_not_map_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(mapped_file_module, "_SECONDS_BETWEEN_CHECKS", -1.0)
    available(kind)
    path = tmp_path / f"a.{ENDINGS[kind]}"
    expected = write(kind, path, texts(9))
    sent = pickle.loads(pickle.dumps(SOURCES[kind](path)))
    assert same(sent[3], expected[3])
    os.utime(path, ns=(1, 1))
    with pytest.raises(FormatError, match=rf"{path.name} has changed since it was opened"):
        sent[3]


def test_a_fingerprint_may_be_an_attribute() -> None:
    class Versioned(list[Any]):
        def __init__(self, version: Any) -> None:
            super().__init__([{"x": 1}])
            self.fingerprint = version

    assert fingerprint_of(Versioned("v1")) == {"name": "Versioned", "content": "v1"}
    assert fingerprint_of(Versioned(("a.bin", 3))) == {"name": "Versioned", "content": ["a.bin", 3]}
    assert fingerprint_of(Versioned(None)) == {"name": "Versioned"}
