"""What a transform is given, and what is told of images that cannot be read."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from libai_data.data.datasets import LabelledImages
from libai_data.errors import FormatError, SampleError
from libai_data.data.transforms import EncodedImage

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


def test_a_mode_that_only_pillow_knows_gives_pillow_images() -> None:
    recorder = Recorder(True)
    for index in range(3):
        assert LabelledImages(Source(), recorder, "RGBA")[index].images.tensor.shape == (4, 5, 4)
    assert all(isinstance(image, Image.Image) for image in recorder.given)


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_images_that_cannot_be_read_are_named(mode: str) -> None:
    dataset = LabelledImages(Source(), mode=mode)
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
