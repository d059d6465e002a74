"""Decoding images: JPEG by libjpeg-turbo, at about the needed size; other formats by Pillow."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from libai_data.data.cached_property import cached_property
from libai_data.data.transforms.libraries import libjpeg_turbo, scratch
from libai_data.errors import ConfigError, FormatError, nearest

MODES = ("RGB", "L")

_JPEG = b"\xff\xd8\xff"
_EXIF = b"Exif\x00\x00"
_SCAN = b"\xff\xda"
_TAGS = {name: number for number, name in ExifTags.TAGS.items()}
_ORIENTATION, _BITS, _COLOURS = _TAGS["Orientation"], _TAGS["BitsPerSample"], _TAGS["PhotometricInterpretation"]
_WHITE_IS_ZERO = 0
_REDUCTIONS = (8, 4, 2)  # libjpeg-turbo decodes at 1/8, 1/4 and 1/2 faster than in full, but at 5/8 to 7/8 slower


def decode_image(data: bytes, mode: str = "RGB") -> np.ndarray:
    """Decode an image completely, rotated by its EXIF orientation.

    Args:
        data: the file's bytes: JPEG, PNG, WebP, BMP, GIF (its first frame) or TIFF.
        mode: "RGB", or "L" for greyscale.

    Returns:
        uint8 [H, W, 3], or [H, W] for "L". Of 12 or 16 bits a channel, the upper 8 are used; transparency is left out.

    Raises:
        FormatError: The image is truncated, corrupt, of an unknown format or pixel type, or has more pixels than twice
            Pillow's `Image.MAX_IMAGE_PIXELS`.
        ConfigError: There is no such mode.
    """
    return EncodedImage(data, mode).decode()


class EncodedImage:
    """An image that is not decoded yet, so that a transform that crops can decode it at the scale it needs.

    `numpy.asarray` decodes it in full.

    Args:
        data: the file's bytes; see `decode_image`.
        mode: "RGB", or "L" for greyscale.

    Raises:
        ConfigError: There is no such mode.
    """

    def __init__(self, data: bytes, mode: str = "RGB") -> None:
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}; it must be one of {MODES}.{nearest(mode, MODES)}")
        self.data = data
        self.mode = mode

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels, after the EXIF orientation is applied; or a FormatError, as of `decode_image`."""
        height, width, _ = self._header
        return (width, height) if self._orientation >= 5 else (height, width)

    def decode(self, reduction: int = 1) -> np.ndarray:
        """Decode the whole image.

        Args:
            reduction: 1, 2, 4 or 8; a JPEG is decoded at this fraction of its height and width, rounded up, in less
                time; any other image is not reduced.

        Returns:
            uint8 [H, W, 3] or [H, W].

        Raises:
            FormatError: See `decode_image`.
        """
        return self._upright(reduction, rough=False)

    def _upright(self, reduction: int, rough: bool) -> np.ndarray:
        """The pixels, turned upright. Source: Exif 2.32 (CIPA DC-008), 4.6.4, tag Orientation."""
        pixels, orientation = self._decode_stored(reduction, rough), self._orientation
        if orientation == 1:
            return pixels
        pixels = pixels.swapaxes(0, 1) if orientation >= 5 else pixels
        flips_rows, flips_columns = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
        return np.ascontiguousarray(pixels[:: -1 if flips_rows else 1, :: -1 if flips_columns else 1])

    def region(
        self, top: int, left: int, height: int, width: int, at_least: tuple[int, int], rough: bool = False
    ) -> np.ndarray:
        """Decode a region, at the smallest scale at which the region is at least as large as `at_least`.

        Args:
            top, left, height, width: of the region, in pixels of the whole image; rounded to whole pixels of a reduced
                image.
            at_least: needed height and width.
            rough: decode a JPEG faster, for pixels that are resized at once: with the fast inverse DCT, and without
                interpolation when colours are enlarged. The next rough region of this thread overwrites the pixels.

        Returns:
            uint8 [h, w, 3] or [h, w], where h and w are at least the needed size, minus one for rounding, and at most
            the region's own size.

        Raises:
            FormatError: See `decode_image`.
        """
        fits = (each for each in _REDUCTIONS if height >= at_least[0] * each and width >= at_least[1] * each)
        reduction = next(fits, 1) if self._header[2] else 1
        pixels = self._upright(reduction, rough)
        rows = _reduced(top, height, reduction, pixels.shape[0])
        return pixels[rows, _reduced(left, width, reduction, pixels.shape[1])]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        pixels = self.decode()
        return pixels if dtype is None else pixels.astype(dtype)

    @cached_property
    def _is_jpeg(self) -> bool:
        return self.data[:3] == _JPEG

    @cached_property
    def _header(self) -> tuple[int, int, bool]:
        """Height and width as they are stored, and whether libjpeg-turbo is to decode the image."""
        if self._is_jpeg:
            with suppress(ValueError):  # libjpeg-turbo refuses some samplings of colours, which Pillow decodes.
                height, width, colours, _ = libjpeg_turbo().decode_jpeg_header(self.data)
                _check_pixels(height, width)  # as `_opened` does
                # The conversion of CMYK to RGB is a matter of convention, and Pillow's convention is the usual one.
                return height, width, colours not in ("CMYK", "YCCK")
        image = self._opened
        return image.height, image.width, False

    @cached_property
    def _orientation(self) -> int:
        """The EXIF orientation, 1 to 8; 1 is upright."""
        if self._is_jpeg and not _may_have_exif(self.data):
            return 1
        image = self._opened
        if image.format == "TIFF":  # Pillow turns it when it decodes it.
            return 1
        try:
            found = image.getexif().get(_ORIENTATION, 1)
        except Exception:  # Malformed metadata raises many kinds of errors, but the pixels may be valid.
            return 1
        return found if isinstance(found, int) and 1 <= found <= 8 else 1

    @cached_property
    def _opened(self) -> Image.Image:
        """The image in Pillow. To look for the orientation, Pillow decodes a PNG, which must not happen twice."""
        try:
            image = Image.open(io.BytesIO(self.data))
        except Exception as error:
            if isinstance(error, Image.DecompressionBombError):
                raise FormatError(f"the image is too large: {error}") from error
            raise FormatError(
                f"no image of a known format: {error} ({len(self.data)} bytes that begin with {self.data[:8]!r})"
            ) from error
        _check_pixels(image.height, image.width)
        return image

    def _decode_stored(self, reduction: int, rough: bool) -> np.ndarray:
        height, width, by_turbo = self._header
        if not by_turbo:
            return self._decode_by_pillow()
        form = "GRAY" if self.mode == "L" else "RGB"
        options: dict[str, Any] = {}
        if reduction > 1:
            options.update(min_height=-(-height // reduction), min_width=-(-width // reduction))
        if rough:
            options.update(fastdct=True, fastupsample=True, buffer=scratch("decoded", (height * width * 3,)))
        try:
            pixels = libjpeg_turbo().decode_jpeg(self.data, form, **options)
        except ValueError as error:
            raise FormatError(f"the JPEG of {width} x {height} pixels is truncated or corrupt: {error}") from error
        return pixels[:, :, 0] if self.mode == "L" else pixels

    def _decode_by_pillow(self) -> np.ndarray:
        image = self._opened
        try:
            if not image.mode.startswith(("I", "F")):
                return np.array(image.convert(self.mode))
            pixels = np.asarray(image)
        except Exception as error:  # Pillow's decoders raise many kinds of errors for a broken file.
            raise FormatError(f"the {image.format} image is truncated or corrupt: {error}") from error
        is_float = pixels.dtype.kind == "f"
        # Of the formats with more than 8 bits, only those of TIFF are not scaled to 16, and not inverted by Pillow.
        tags = getattr(image, "tag_v2", {})
        bits = tags.get(_BITS, (16,))[0]
        if is_float or bits > 16 or pixels.min() < 0 or pixels.max() > 0xFFFF:
            kind = "floating point" if is_float else "32 bits"
            raise FormatError(f"the {image.format} image has pixels of {kind}; save it with 8 or 16 bits a channel")
        upper = (pixels.astype(np.uint16) >> (bits - 8)).astype(np.uint8)
        if tags.get(_COLOURS) == _WHITE_IS_ZERO:
            upper = 255 - upper
        return upper if self.mode == "L" else np.repeat(upper[:, :, None], 3, axis=2)


def _may_have_exif(jpeg: bytes) -> bool:
    """Whether a segment before the pixels of a JPEG is of EXIF, or the segments are malformed. Pillow needs longer."""
    place = 2
    while jpeg[place : place + 1] == b"\xff" and jpeg[place + 4 : place + 10] != _EXIF:
        if jpeg[place : place + 2] == _SCAN:
            return False
        place += 2 + int.from_bytes(jpeg[place + 2 : place + 4], "big")
    return True


def _check_pixels(height: int, width: int) -> None:
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and height * width > 2 * most:
        raise FormatError(
            f"the image has {width} x {height} pixels, more than {2 * most}; to allow such images, raise "
            "PIL.Image.MAX_IMAGE_PIXELS; an image may have twice as many pixels"
        )


def _reduced(begin: int, length: int, reduction: int, size: int) -> slice:
    """The range of pixels in an image that was reduced to `size` pixels, 1 for each `reduction`; at least one pixel."""
    first = min(round(begin / reduction), size - 1)
    return slice(first, max(first + 1, round((begin + length) / reduction)))
