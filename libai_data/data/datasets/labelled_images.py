"""Labelled images of any source, as samples for an image classifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Callable, Protocol

import numpy as np
from PIL import Image

from libai_data.data.attributes import attribute_of
from libai_data.data.random.sample_random import reading_row
from libai_data.data.transforms.decode import MODES, EncodedImage
from libai_data.data.transforms.image import ImageToFloat
from libai_data.data.transforms.pipeline import transform_into, transform_stages
from libai_data.data.transforms.timing import transform_time
from libai_data.errors import FormatError, SampleError
from libai_data.errors.argument_rules import FUNCTION, check, one_of, or_none
from libai_data.mesh.arrays import as_array, check_fits
from libai_data.structures import DistTensorData, Instance

Transform = Callable[[Any], Any]


class ImageSource(Protocol):
    """A source of labelled images."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[bytes | np.ndarray, int]:
        """Read an image, as encoded bytes or as uint8 [H, W, 3] or [H, W], and its label."""
        ...

    def name(self, index: int) -> str:
        """The place of an image, such as its path, for error messages."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Values that identify the content, for checkpoints."""
        ...


class LabelledImages:
    """Images of a source with their class numbers.

    Args:
        source: the images.
        transform: function from an image to an array; by default to float32 [C, H, W] from 0 to 1. The image is a
            Pillow image. If `transform` has `takes_encoded = True`, the image is an `EncodedImage`, or uint8 [H, W, 3]
            or [H, W]. Random transforms may use `sample_generator`, or the global generators, as in any dataset.
        mode: "RGB", or "L" for greyscale; images are converted to it.
        target_transform: function from a class number to the label, a number or an array; by default the class number.

    Raises:
        ConfigError: `transform` or `target_transform` is no function, or there is no such mode.
    """

    def __init__(
        self,
        source: ImageSource,
        transform: Transform | None = None,
        mode: str = "RGB",
        target_transform: Transform | None = None,
    ) -> None:
        function = or_none(FUNCTION)
        rules = {"transform": function, "target_transform": function, "mode": one_of(*MODES)}
        check(rules, transform=transform, target_transform=target_transform, mode=mode)
        self.source = source
        self.transform = ImageToFloat() if transform is None else transform
        self.mode = mode
        self.target_transform = target_transform

    def __len__(self) -> int:
        return len(self.source)

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of their numbers. The attribute exists only if the source has it."""
        return list(getattr(self.source, "classes"))  # noqa: B009 (not all sources have it)

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Name of each class -> its number."""
        return {name: number for number, name in enumerate(self.classes)}

    def __getitem__(self, index: int) -> Instance:
        """Instance of `images` (first stage) and `labels` (int64 [] by default, last stage).

        Raises:
            FormatError: The image cannot be decoded; the message names the image.
            SampleError: The image's file cannot be read; the message names the image.
        """
        image, label = self._read(index)
        with self._transforming(index):
            pixels = self.transform(self._as_taken(image))
        return Instance(images=DistTensorData(pixels), labels=DistTensorData(self._label(label), placement_idx=-1))

    def read_batch(self, indices: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Read samples directly into the rows of a batch.

        Args:
            indices: int64 [n].
            out: field -> array [n, ...] to fill.
        """
        for row, index in enumerate(indices.tolist()):
            with reading_row(row):
                image, label = self._read(index)
                self._put_label(label, out["labels"][row, ...])
                with self._transforming(index):
                    transform_into(self.transform, self._as_taken(image), out["images"][row], "images")

    def stages(self, index: int) -> list[tuple[str, Any]]:
        """The image as it was opened, and after each stage of the transform; see `transform_stages`."""
        image, _ = self._read(index)
        with self._transforming(index):
            opened = self._as_pillow(image)
            taken = self._as_taken(image)
            return [(f"opened as {self.mode}", opened), *transform_stages(self.transform, taken)]

    def fingerprint(self) -> dict[str, Any]:
        """What the source reports about its content."""
        return self.source.fingerprint()

    def _label(self, label: int) -> Any:
        return np.int64(label) if self.target_transform is None else self.target_transform(label)

    def _put_label(self, label: int, out: np.ndarray) -> None:
        array = as_array(self._label(label), "labels")
        check_fits("labels", array, out, " (from target_transform)" * (self.target_transform is not None))
        out[...] = array

    def _read(self, index: int) -> tuple[bytes | np.ndarray, int]:
        try:
            return self.source.read(index)
        except OSError as error:
            raise SampleError(f"{self.source.name(index)} cannot be read: {error}") from error

    def _as_taken(self, image: bytes | np.ndarray) -> Any:
        if not attribute_of(self.transform, "takes_encoded", False):
            return self._as_pillow(image)
        if isinstance(image, bytes):
            return EncodedImage(image, self.mode)
        return image if image.ndim == _DIMS[self.mode] else np.asarray(Image.fromarray(image).convert(self.mode))

    def _as_pillow(self, image: bytes | np.ndarray) -> Image.Image:
        if isinstance(image, np.ndarray):
            return Image.fromarray(image).convert(self.mode)
        return Image.fromarray(EncodedImage(image, self.mode).decode())

    @contextmanager
    def _transforming(self, index: int) -> Iterator[None]:
        """Within the block, measure the transform's time, and add the image's name to a FormatError."""
        try:
            with transform_time():
                yield
        except FormatError as error:
            raise FormatError(f"{self.source.name(index)} cannot be read as an image: {error}") from error


_DIMS = {"RGB": 3, "L": 2}
