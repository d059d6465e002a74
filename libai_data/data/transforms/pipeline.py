"""A sequence of transforms, with a random generator for each sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from libai_data.data.random.sample_random import passing_generator, sample_generator
from libai_data.data.transforms.decode import EncodedImage
from libai_data.data.transforms.image import ImageToFloat, array_of_image
from libai_data.errors import ConfigError, SchemaError
from libai_data.errors.argument_rules import check_types


class RandomTransform:
    """Base class of random transforms. They change an image by `apply`, and never in place.

    A transform that is called alone draws from the generator of the sample that is being read. A `Compose` passes the
    same generator to each of its transforms.
    """

    takes_encoded = True

    def __call__(self, image: Any) -> np.ndarray:
        """Transform an image: a uint8 array [H, W, 3] or [H, W], a Pillow image or an `EncodedImage`."""
        return self.apply(image, sample_generator())

    def apply(self, image: Any, generator: np.random.Generator) -> np.ndarray:
        """Transform an image."""
        raise NotImplementedError


class Compose:
    """Applies transforms in turn.

    Args:
        transforms: `RandomTransform`s, or any callables from an image (an array after the first one) to an image.

    Raises:
        ConfigError: There is no transform, one cannot be called or is a class of transforms, or a random one has a
            `__call__` of its own.
    """

    def __init__(self, transforms: Sequence[Any]) -> None:
        check_types(Compose, locals())
        self.transforms = list(transforms)
        if not self.transforms:
            raise ConfigError("Compose was given no transforms; name at least one")
        for number, part in enumerate(self.transforms):
            if isinstance(part, type) and any("__call__" in vars(base) for base in part.__mro__):
                name = part.__name__
                raise ConfigError(f"transforms[{number}] is the class {name}; pass an object of it, {name}(...)")
            if not callable(part):
                raise ConfigError(
                    f"transforms[{number}] is {part!r:.200}; it must be a function, or an object that is called"
                )
            if _draws(part) and not (_is_called_as(part, RandomTransform) or _is_called_as(part, Compose)):
                raise ConfigError(
                    f"transforms[{number}] is a {type(part).__name__} with a __call__ of its own, but Compose calls "
                    "apply(image, generator), so that all its transforms draw from one generator; override apply"
                )
        self._draws = any(_draws(part) for part in self.transforms)
        self._writer: Any = next((part for part in self.transforms if _is_called_as(part, ImageToFloat)), None)

    @property
    def takes_encoded(self) -> bool:
        """Whether the first transform decodes the image by itself, and so can get an `EncodedImage`."""
        return getattr(self.transforms[0], "takes_encoded", False)

    def __call__(self, image: Any, out: np.ndarray | None = None) -> Any:
        """Transform an image.

        Args:
            image: a uint8 array [H, W, 3] or [H, W], a Pillow image or an `EncodedImage`.
            out: an array for the result, if the result may be written directly into memory.

        Returns:
            What the last transform returns; `out` if the result was written into it.
        """
        with passing_generator() if self._draws else nullcontext() as generator:
            return self.apply(image, generator, out)

    def apply(self, image: Any, generator: np.random.Generator | None, out: np.ndarray | None = None) -> Any:
        """Transform an image, with numbers drawn from a generator; see `__call__`."""
        for part in self.transforms:
            if generator is not None and _draws(part):
                image = part.apply(image, generator)
            elif out is not None and part is self._writer:
                image = part(image, out)
            else:
                image = part(image)
        return image


def _draws(part: Any) -> bool:
    return isinstance(part, RandomTransform) or (isinstance(part, Compose) and part._draws)


def _is_called_as(part: Any, kind: type) -> bool:
    """Whether calling a part calls the `__call__` of `kind`, and not one of a subclass."""
    return isinstance(part, kind) and type(part).__call__ is kind.__call__


def transform_stages(transform: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Apply a transform, and yield the result of each of its stages.

    The stages of a `Compose` are its transforms. Any class named `Compose` with a list `transforms` counts, as those of
    flowvision and torchvision. Any other transform is one stage.

    Args:
        transform: from a value to a value.

    Yields:
        Name of the stage, and its result.
    """
    parts = getattr(transform, "transforms", None)
    # Other classes have such a list too, but may apply only some of its transforms, or in another order.
    if type(transform).__name__ != "Compose" or not isinstance(parts, (list, tuple)):
        parts = [transform]
    generator = sample_generator() if isinstance(transform, Compose) else None
    for part in parts:
        value = part.apply(value, generator) if generator is not None and _draws(part) else part(value)
        yield getattr(part, "__name__", type(part).__name__), value


def pixels_of(image: Any) -> np.ndarray:
    """The pixels of an image in any form.

    Returns:
        uint8 [H, W, 3] or [H, W].

    Raises:
        SchemaError: The pixels have another shape or dtype, or the image has a palette.
        FormatError: The image cannot be decoded.
    """
    pixels = array_of_image(image)
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)):
        raise SchemaError(f"the image is {pixels.dtype} {list(pixels.shape)}; expected uint8 [H, W, 3] or [H, W]")
    if not pixels.size:
        raise SchemaError(f"the image is {list(pixels.shape)}, and has no pixels")
    return pixels


def size_of(image: Any) -> tuple[int, int]:
    """Height and width of an image in any form; an `EncodedImage` is not decoded for this."""
    if isinstance(image, EncodedImage):
        return image.size
    height, width = pixels_of(image).shape[:2]
    return height, width


def transform_into(transform: Any, image: Any, out: np.ndarray, name: str) -> None:
    """Transform an image into its place in a batch, `out`, without a copy if the transform supports this."""
    made = transform(image, out) if _is_called_as(transform, Compose) else transform(image)
    if made is out:
        return
    array = np.asarray(made)
    if array.shape != out.shape or array.dtype != out.dtype:
        raise SchemaError(
            f"field '{name}' is {array.dtype} {list(array.shape)}, in the samples before it {out.dtype} "
            f"{list(out.shape)}; let the transform return the same fields, shapes and dtypes for all samples"
        )
    out[...] = array
