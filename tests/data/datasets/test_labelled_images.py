"""What a transform is given, and what is told of images that cannot be read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from libai_data import DataLoader
from libai_data.data.datasets import ImageFolderDataset, LabelledImages
from libai_data.data.samplers import SingleRoundSampler
from libai_data.data.transforms import EncodedImage
from libai_data.errors import ConfigError, FormatError, SampleError

PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3) * 4


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


class Source:
    """The same picture encoded, in colour and in grey; and bytes that are none, and a file that has gone."""

    images: tuple[bytes | np.ndarray | OSError, ...] = (
        *(png(PIXELS), PIXELS, PIXELS[:, :, 0], b"no image"),
        OSError("gone"),
    )

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[bytes | np.ndarray, int]:
        image = self.images[index]
        if isinstance(image, OSError):
            raise image
        return image, index

    def name(self, index: int) -> str:
        return f"number {index}"

    def fingerprint(self) -> dict[str, Any]:
        return {"images": len(self)}


class Recorder:
    """A transform that keeps what it was given."""

    def __init__(self, takes_encoded: bool) -> None:
        self.takes_encoded = takes_encoded
        self.given: list[Any] = []

    def __call__(self, image: Any) -> np.ndarray:
        self.given.append(image)
        return np.asarray(image)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_transform_is_given_what_it_takes_with_the_same_pixels(mode: str, index: int) -> None:
    recorders = {takes: Recorder(takes) for takes in (True, False)}
    made = [LabelledImages(Source(), recorder, mode)[index] for recorder in recorders.values()]
    np.testing.assert_array_equal(made[0].images.tensor, made[1].images.tensor)
    assert made[0].images.tensor.shape == ((4, 5, 3) if mode == "RGB" else (4, 5))
    assert isinstance(recorders[True].given[0], EncodedImage if index == 0 else np.ndarray)
    assert isinstance(recorders[False].given[0], Image.Image)


def test_images_that_cannot_be_read_are_named() -> None:
    dataset = LabelledImages(Source())
    for read in (dataset.__getitem__, dataset.stages):
        with pytest.raises(FormatError, match="number 3 cannot be read as an image"):
            read(3)
        with pytest.raises(SampleError, match="number 4 cannot be read: gone"):
            read(4)


def test_stages_begin_with_the_picture_and_end_with_the_sample() -> None:
    dataset = LabelledImages(Source(), mode="L")
    stages = dataset.stages(0)
    assert [name for name, _ in stages] == ["opened as L", "ImageToFloat"]
    np.testing.assert_array_equal(stages[-1][1], dataset[0].images.tensor)
    assert dataset.fingerprint() == {"images": 5}


SMALL = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for number, name in enumerate(["cat/a", "cat/b", "dog/c", "dog/d"]):
        (root / name).parent.mkdir(exist_ok=True)
        Image.fromarray(SMALL + np.uint8(number)).save(root / f"{name}.png")
    return root


def one_hot(number: int) -> np.ndarray:
    return np.eye(2, dtype=np.float32)[number]


def test_a_folder_tells_its_classes_and_labels_may_be_transformed(folder: Path) -> None:
    dataset = ImageFolderDataset(folder, target_transform=one_hot)
    assert dataset.classes == ["cat", "dog"] and dataset.class_to_idx == {"cat": 0, "dog": 1}
    assert dataset.targets.tolist() == [0, 0, 1, 1]
    assert dataset[2].labels.tensor.tolist() == [0, 1]
    [batch] = DataLoader(dataset, 4)
    assert batch.labels.tensor.numpy().tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
    assert batch.labels.placement_idx == -1
    with pytest.raises(ConfigError, match="target_transform is 3; it must be a function"):
        ImageFolderDataset(folder, target_transform=3)  # type: ignore[arg-type]
    weights = 1 / np.bincount(dataset.targets)[dataset.targets]
    assert len(list(DataLoader(dataset, 2, weights=weights))) == 2


@given(st.data())
def test_a_broken_file_is_named_with_its_index(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("broken")
    (root / "cat").mkdir()
    for name in "ab":
        Image.fromarray(SMALL).save(root / "cat" / f"{name}.png")
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


class Pictures(Source):
    images = (png(PIXELS),) * 8


@pytest.mark.parametrize("make", [lambda label: 0 if label < 4 else 0.5, lambda label: np.zeros((label < 4) + 1, int)])
def test_labels_of_another_dtype_or_shape_are_refused_and_not_rounded(make: Any) -> None:
    dataset = LabelledImages(Pictures(), target_transform=make)
    with pytest.raises(SampleError, match=r"sample \d of LabelledImages has another schema .*labels"):
        list(DataLoader(dataset, SingleRoundSampler(dataset, 2)))
