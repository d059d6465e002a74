"""The binary files of CIFAR and MNIST, as their pages describe them."""

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
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from libai_data.data.datasets.image_datasets import CIFAR10Dataset, CIFAR100Dataset, FashionMNISTDataset, MNISTDataset
from libai_data.data.sources.cifar import CIFAR10, CIFAR100, CIFARSource
from libai_data.data.sources.mnist import FASHION_MNIST, MNIST, MNISTSource, read_idx
from libai_data.errors import ConfigError, FormatError, StorageError
from tests.data.sources.published_files import (
    WebFolder,
    cifar_image,
    idx,
    mnist_files,
    tar_of,
    write_cifar10,
    write_cifar100,
    write_mnist,
)
from tests.properties import in_one_folder


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
    with pytest.raises(FormatError, match=r"_2\.bin at offset 3073: label 10 of image 1 of .*; there are 10 classes"):
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


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("inner", ["MNIST/raw", ""])
def test_images_and_labels_are_those_of_the_files(tmp_path: Path, compressed: bool, inner: str) -> None:
    write_mnist(tmp_path / "data" / inner, compressed)
    for train, count, shift in ((True, 5, 0), (False, 3, 1)):
        source = MNISTSource(tmp_path / "data", MNIST, train)
        assert len(source) == count
        for index in range(count):
            image, label = source.read(index)
            expected = np.arange(index * 784, (index + 1) * 784).reshape(28, 28).astype(np.uint8)
            np.testing.assert_array_equal(image, expected)
            assert label == index + shift


def test_a_sample_has_the_fields_of_libai(tmp_path: Path) -> None:
    write_cifar100(tmp_path)
    write_mnist(tmp_path / "MNIST" / "raw")
    write_mnist(tmp_path / "FashionMNIST" / "raw", compressed=True)
    cases = ((CIFAR100Dataset, (3, 32, 32), 97), (MNISTDataset, (1, 28, 28), 2), (FashionMNISTDataset, (1, 28, 28), 2))
    for kind, shape, label in cases:
        sample = kind(root=str(tmp_path), train=True)[2]
        assert list(sample.get_fields()) == ["images", "labels"]
        assert (sample.images.tensor.dtype, sample.images.tensor.shape) == (np.float32, shape)
        assert (sample.labels.tensor.dtype, sample.labels.tensor.tolist()) == (np.int64, label)
        assert (sample.images.placement_idx, sample.labels.placement_idx) == (0, -1)
    assert CIFARSource(tmp_path, CIFAR100).classes[99] == "fine99"
    pixels = CIFAR100Dataset(tmp_path)[2].images.tensor
    np.testing.assert_array_equal(pixels, cifar_image(2).transpose(2, 0, 1) / np.float32(255))
    assert FashionMNISTDataset(tmp_path).source.name(2).startswith("image 2 of")
    assert len(MNIST.classes) == len(FASHION_MNIST.classes) == 10


@in_one_folder(40)
@given(values=arrays(np.uint8, array_shapes(min_dims=1, max_dims=3, max_side=9)), cut=st.integers(0, 800))
def test_idx_files_are_read_whole_or_refused(tmp_path: Path, values: np.ndarray, cut: int) -> None:
    data = idx(values)
    for name, pack in (("x", bytes), ("x.gz", gzip.compress)):
        path = tmp_path / name
        path.write_bytes(pack(data))
        np.testing.assert_array_equal(read_idx(path, values.ndim), values)
        if cut < len(data):
            path.write_bytes(pack(data[:cut]))
            with pytest.raises(FormatError, match=r"cut short at offset|begins with"):
                read_idx(path, values.ndim)
        path.write_bytes(pack(data + b"x"))
        with pytest.raises(FormatError, match=f"goes on at offset {len(data)}"):
            read_idx(path, values.ndim)


def test_files_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    folder = write_mnist(tmp_path / "MNIST" / "raw")
    (folder / "train-labels-idx1-ubyte").write_bytes(mnist_files(train=4)["train-labels-idx1-ubyte"])
    with pytest.raises(FormatError, match=r"has 5 images, and .*train-labels-idx1-ubyte 4 labels"):
        MNISTDataset(tmp_path)
    (folder / "train-labels-idx1-ubyte").write_bytes((folder / "train-images-idx3-ubyte").read_bytes())
    with pytest.raises(FormatError, match=r"labels-idx1-ubyte begins with .* as unsigned bytes of 1 dims do"):
        MNISTDataset(tmp_path)


def test_a_label_without_a_class_is_refused_by_its_image(tmp_path: Path) -> None:
    folder = write_mnist(tmp_path / "MNIST" / "raw")
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(np.array([0, 10, 1, 2, 3], np.uint8)))
    source = MNISTSource(tmp_path, MNIST)
    with pytest.raises(FormatError, match="labels-idx1-ubyte at offset 9: label 10 of image 1 of"):
        source.read(1)


def test_missing_files_are_named_and_fetched_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LIBAI_DATA_STORAGE_ATTEMPTS", "1")
    web = write_mnist(tmp_path / "web", compressed=True)
    sums = {path.stem: hashlib.md5(path.read_bytes()).hexdigest() for path in web.iterdir()}
    server = WebFolder(web)
    try:
        with pytest.raises(ConfigError, match=r"there is no .*train-images-idx3-ubyte, nor .*download=True"):
            MNISTDataset(tmp_path / "data", source_url=f"{server.url}/")
        with pytest.raises(StorageError, match=r"has the md5 sum .*, and not f68b3c2dcbeaaa9fbdd348bbdeb94873"):
            MNISTDataset(tmp_path / "data", download=True, source_url=f"{server.url}/")
        kind = replace(MNIST, md5=sums, mirrors=("http://127.0.0.1:9/", f"{server.url}/"))
        monkeypatch.setattr(MNISTDataset, "_source", partial(MNISTSource, kind=kind))
        assert len(MNISTDataset(tmp_path / "data", download=True)) == 5
        asked = len(server.asked)
        assert len(MNISTDataset(tmp_path / "data", train=False, download=True)) == 3
        assert len(server.asked) == asked
    finally:
        server.close()
    assert sorted(path.name for path in (tmp_path / "data" / "MNIST" / "raw").iterdir()) == sorted(sums)
