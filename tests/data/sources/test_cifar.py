"""CIFAR's binary files, as their page describes them."""

from __future__ import annotations

import gzip
import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from libai_data.data.datasets.image_datasets import CIFAR10Dataset, CIFAR100Dataset
from libai_data.errors import ConfigError, FormatError, StorageError
from libai_data.data.sources.cifar import CIFAR10, CIFAR100, CIFARSource
from tests.data.sources.published_files import WebFolder, cifar_image, tar_of, write_cifar10, write_cifar100


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebFolder]:
    """A server of an archive that takes the place of CIFAR-10's, with its check sum."""
    folder = write_cifar10(tmp_path / "made")
    files = {f"{folder.name}/{path.name}": path.read_bytes() for path in folder.iterdir()}
    archive = gzip.compress(tar_of({**files, f"{folder.name}/readme.html": b"not needed", "../outside": b"never"}))
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "cifar.tar.gz").write_bytes(archive)
    kind = replace(CIFAR10, url="", md5=hashlib.md5(archive).hexdigest())
    monkeypatch.setattr(CIFAR10Dataset, "_source", partial(CIFARSource, kind=kind))
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LIBAI_DATA_STORAGE_ATTEMPTS", "1")
    server = WebFolder(tmp_path / "web")
    yield server
    server.close()


@pytest.mark.parametrize(("train", "count", "first"), [(True, 10, 0), (False, 2, 10)])
def test_images_and_labels_of_all_files_come_in_their_order(
    tmp_path: Path, train: bool, count: int, first: int
) -> None:
    write_cifar10(tmp_path)
    source = CIFARSource(tmp_path, CIFAR10, train)
    assert len(source) == count and source.classes == tuple(f"class{number}" for number in range(10))
    for index in range(count):
        image, label = source.read(index)
        np.testing.assert_array_equal(image, cifar_image(first + index))
        assert label == (first + index) % 10
    assert source.read(-1)[1] == (first + count - 1) % 10
    for outside in (count, -count - 1):
        with pytest.raises(IndexError, match="outside"):
            source.read(outside)


def test_of_a_hundred_classes_the_fine_label_counts(tmp_path: Path) -> None:
    write_cifar100(tmp_path)
    source = CIFARSource(tmp_path, CIFAR100)
    assert [source.read(index)[1] for index in range(3)] == [99, 98, 97]
    assert source.classes[99] == "fine99"
    np.testing.assert_array_equal(source.read(2)[0], cifar_image(2))


def test_a_sample_has_the_fields_of_libai(tmp_path: Path) -> None:
    write_cifar100(tmp_path)
    sample = CIFAR100Dataset(root=str(tmp_path), train=False)[1]
    assert list(sample.get_fields()) == ["images", "labels"]
    assert (sample.images.tensor.dtype, sample.images.tensor.shape) == (np.float32, (3, 32, 32))
    np.testing.assert_array_equal(sample.images.tensor, cifar_image(1).transpose(2, 0, 1) / np.float32(255))
    assert (sample.labels.tensor.dtype, sample.labels.tensor.tolist()) == (np.int64, 98)
    assert (sample.images.placement_idx, sample.labels.placement_idx) == (0, -1)


@pytest.mark.parametrize("cut", [0, 3072, 6145])
def test_a_file_cut_short_is_refused_with_the_offset(tmp_path: Path, cut: int) -> None:
    path = write_cifar10(tmp_path) / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(
        FormatError, match=rf"data_batch_3\.bin has {cut} bytes.*cut short at offset {cut - cut % 3073}"
    ):
        CIFARSource(tmp_path, CIFAR10)


def test_a_label_without_a_class_is_refused_with_the_offset(tmp_path: Path) -> None:
    path = write_cifar10(tmp_path) / "data_batch_2.bin"
    data = bytearray(path.read_bytes())
    data[3073] = 10
    path.write_bytes(data)
    source = CIFARSource(tmp_path, CIFAR10)
    source.read(2)
    with pytest.raises(
        FormatError, match=r"data_batch_2\.bin at offset 3073: label 10 of image 1; there are 10 classes"
    ):
        source.read(3)


def test_the_pickled_version_is_refused_and_never_read(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(pickle.dumps({"data": [], "labels": []}))
    with pytest.raises(ConfigError, match=r"cifar-10-batches-py is the pickled version, .*download=True"):
        CIFAR10Dataset(tmp_path)


def test_what_is_downloaded_is_checked_unpacked_and_not_fetched_again(tmp_path: Path, published: WebFolder) -> None:
    with pytest.raises(ConfigError, match="give download=True"):
        CIFAR10Dataset(tmp_path / "data", source_url=f"{published.url}/cifar.tar.gz")
    for train in (True, False):
        dataset = CIFAR10Dataset(tmp_path / "data", train, download=True, source_url=f"{published.url}/cifar.tar.gz")
        assert len(dataset) == (10 if train else 2)
    assert published.asked == ["/cifar.tar.gz"]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["cifar-10-batches-bin"]
    assert "readme.html" not in [path.name for path in (tmp_path / "data" / "cifar-10-batches-bin").iterdir()]
    assert not (tmp_path / "outside").exists()


def test_another_archive_than_the_published_one_is_refused(tmp_path: Path, published: WebFolder) -> None:
    archive = tmp_path / "web" / "cifar.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-1] + b"x")
    with pytest.raises(StorageError, match=r"cifar\.tar\.gz has the md5 sum [0-9a-f]{32}, and not"):
        CIFAR10Dataset(tmp_path / "data", download=True, source_url=f"{published.url}/cifar.tar.gz")
    assert not (tmp_path / "data").exists()
