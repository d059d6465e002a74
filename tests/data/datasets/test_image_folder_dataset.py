from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from libai_data.data.datasets import ImageFolderDataset
from libai_data.errors import FormatError, SampleError
from libai_data.loader import DataLoader
from libai_data.loader.failures import ErrorPolicy
from libai_data.loader.reading import SampleReader
from libai_data.loader.schema import array_of
from libai_data.data.random.sample_random import sample_generator
from libai_data.data.samplers import SingleRoundSampler
from libai_data.structures import fields_of

PIXELS = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for number, name in enumerate(["cat/a", "cat/b", "dog/c", "dog/d"]):
        (root / name).parent.mkdir(exist_ok=True)
        Image.fromarray(PIXELS + np.uint8(number)).save(root / f"{name}.png")
    return root


def flip_sometimes(image: Any) -> np.ndarray:
    """Draws from all generators that a transform may draw from."""
    draws = [sample_generator().random(), random.random(), np.random.random()]
    return np.array(draws, dtype=np.float32)


def test_a_sample_is_its_image_and_the_number_of_its_class(folder: Path) -> None:
    dataset = ImageFolderDataset(folder)
    assert len(dataset) == 4
    sample = dataset[2]
    assert list(sample.get_fields()) == ["images", "labels"]
    np.testing.assert_array_equal(
        sample.images.tensor, (PIXELS + np.uint8(2)).transpose(2, 0, 1).astype(np.float32) / np.float32(255)
    )
    assert (sample.images.tensor.dtype, sample.labels.tensor.dtype) == (np.float32, np.int64)
    assert (sample.labels.tensor.tolist(), sample.labels.placement_idx, sample.images.placement_idx) == (1, -1, 0)


def test_images_are_converted_to_the_mode(folder: Path) -> None:
    assert ImageFolderDataset(folder, mode="L")[0].images.shape == (1, 5, 4)
    assert ImageFolderDataset(folder, mode="RGBA")[0].images.shape == (4, 5, 4)


def test_random_transforms_depend_on_seed_epoch_and_index_alone(folder: Path) -> None:
    def read(seed: int, epoch: int, index: int) -> Any:
        reader = SampleReader(ImageFolderDataset(folder, flip_sometimes), seed, ErrorPolicy("raise", None))
        return array_of(fields_of(reader.sample(epoch, index))["images"], "images").tolist()

    expected = read(1, 2, 3)
    random.random()
    np.random.random()
    assert read(1, 2, 3) == expected
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        assert all(found != wanted for found, wanted in zip(read(*other), expected))


@given(st.data())
def test_a_broken_file_is_named_with_its_index(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("broken")
    (root / "cat").mkdir()
    for name in "ab":
        Image.fromarray(PIXELS).save(root / "cat" / f"{name}.png")
    broken = root / "cat" / "b.png"
    content = bytearray(broken.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, 60))]
    else:
        content[data.draw(st.integers(0, 40))] ^= data.draw(st.integers(1, 255))
    broken.write_bytes(content)
    dataset = ImageFolderDataset(root)
    try:
        dataset[1]
    except FormatError as error:
        assert str(broken) in str(error)
        with pytest.raises(SampleError, match=r"sample 1 of ImageFolderDataset.*b\.png cannot be read as an image"):
            list(DataLoader(dataset, SingleRoundSampler(dataset, 2)))


def test_a_file_that_has_vanished_is_named(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    Image.fromarray(PIXELS).save(tmp_path / "cat" / "a.png")
    dataset = ImageFolderDataset(tmp_path)
    (tmp_path / "cat" / "a.png").unlink()
    with pytest.raises(SampleError, match=r"cat/a\.png cannot be read"):
        dataset[0]
