"""MNIST's files, as their page describes them."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from libai_data.data.datasets.image_datasets import FashionMNISTDataset, MNISTDataset
from libai_data.errors import ConfigError, FormatError, StorageError
from libai_data.data.sources.mnist import FASHION_MNIST, MNIST, MNISTSource, read_idx
from tests.properties import examples
from tests.data.sources.published_files import WebFolder, idx, mnist_files, write_mnist


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
    write_mnist(tmp_path / "MNIST" / "raw")
    write_mnist(tmp_path / "FashionMNIST" / "raw", compressed=True)
    for kind in (MNISTDataset, FashionMNISTDataset):
        sample = kind(root=str(tmp_path), train=True)[2]
        assert (sample.images.tensor.dtype, sample.images.tensor.shape) == (np.float32, (1, 28, 28))
        assert (sample.labels.tensor.dtype, sample.labels.tensor.tolist()) == (np.int64, 2)
        assert (sample.images.placement_idx, sample.labels.placement_idx) == (0, -1)
    assert FashionMNISTDataset(tmp_path).source.name(2).startswith("image 2 of")
    assert len(MNIST.classes) == len(FASHION_MNIST.classes) == 10


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_a_gzip_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = write_mnist(tmp_path / "MNIST" / "raw", compressed=True) / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FormatError, match=r"train-images-idx3-ubyte\.gz cannot be decompressed"):
        MNISTDataset(tmp_path)


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
    with pytest.raises(FormatError, match="label 10 of image 1 of"):
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
