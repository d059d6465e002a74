from __future__ import annotations

import io
import struct
import zlib
from typing import Any, Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps, PngImagePlugin

from libai_data.data.transforms.decode import EncodedImage, decode_image
from libai_data.errors import ConfigError, FormatError
from tests.data.transforms.pictures import by_pillow, encoded, photograph


@pytest.mark.parametrize("options", [{}, {"quality": 30, "subsampling": 0}, {"progressive": True}])
def test_a_jpeg_is_decoded_bit_for_bit_as_pillow_does(options: Any) -> None:
    data = encoded(photograph(), **options)
    np.testing.assert_array_equal(decode_image(data), by_pillow(data))


def test_greyscale_of_a_colour_jpeg_is_its_luma_as_pillow_drafts_it() -> None:
    data = encoded(photograph())
    drafted = Image.open(io.BytesIO(data))
    drafted.draft("L", None)
    np.testing.assert_array_equal(decode_image(data, "L"), np.asarray(drafted))
    # Colours made of it, clipped, and made grey again differ by a little.
    assert np.abs(decode_image(data, "L").astype(int) - by_pillow(data, "L")).mean() < 0.5


@pytest.mark.parametrize("form", ["PNG", "WEBP", "BMP", "TIFF", "GIF"])
def test_other_formats_are_decoded_as_pillow_does(form: str) -> None:
    data = encoded(photograph()[:40, :50], form)
    for mode in ("RGB", "L"):
        np.testing.assert_array_equal(decode_image(data, mode), by_pillow(data, mode))


def test_greyscale_palette_alpha_and_one_bit_images_become_three_channels() -> None:
    grey = photograph()[:, :, 0]
    for image, form in [
        (Image.fromarray(grey), "JPEG"),
        (Image.fromarray(grey), "PNG"),
        (Image.fromarray(photograph()).quantize(16), "PNG"),
        (Image.fromarray(np.dstack([photograph(), grey])), "PNG"),
        (Image.fromarray(grey > 100), "PNG"),
    ]:
        data = encoded(image, form)
        pixels = decode_image(data)
        assert pixels.shape == (427, 640, 3) and pixels.dtype == np.uint8
        np.testing.assert_array_equal(pixels, by_pillow(data))


def test_inks_become_the_colours_that_pillow_makes_of_them() -> None:
    data = encoded(Image.fromarray(photograph()).convert("CMYK"))
    np.testing.assert_array_equal(decode_image(data), by_pillow(data))
    assert np.abs(decode_image(data).astype(int) - photograph()).mean() < 6
    assert EncodedImage(data).region(0, 0, 427, 640, (40, 40)).shape == (427, 640, 3)


def test_jpegs_that_libjpeg_turbo_refuses_are_decoded_by_pillow() -> None:
    data = encoded(Image.fromarray(photograph()).convert("CMYK"), subsampling=1)
    assert EncodedImage(data).size == (427, 640)
    np.testing.assert_array_equal(decode_image(data), by_pillow(data))


def test_of_sixteen_bits_the_upper_eight_are_taken() -> None:
    values = np.linspace(0, 65535, 20 * 30).reshape(20, 30).astype(np.uint16)
    for form in ("PNG", "TIFF"):
        data = encoded(Image.fromarray(values), form)
        np.testing.assert_array_equal(decode_image(data, "L"), (values >> 8).astype(np.uint8))
        np.testing.assert_array_equal(decode_image(data)[:, :, 1], (values >> 8).astype(np.uint8))


def test_a_tiff_of_sixteen_bits_whose_zero_is_white_is_not_read_as_a_negative() -> None:
    data = encoded(Image.fromarray(np.array([[0, 0x1234, 0xFFFF]], np.uint16)), "TIFF", tiffinfo={262: 0})
    np.testing.assert_array_equal(decode_image(data, "L"), [[255, 255 - 0x12, 0]])


def test_of_twelve_bits_the_upper_eight_are_taken() -> None:
    """Source: TIFF 6.0, sections 2 and 8; a strip of two pixels."""
    tags = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 122, 277: 1, 278: 1, 279: 3}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    data = struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + bytes.fromhex("123fed")
    np.testing.assert_array_equal(decode_image(data, "L"), [[0x12, 0xFE]])


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_orientation_says(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photograph(), form, exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    image = EncodedImage(data)
    assert image.size == upright.shape[:2]
    np.testing.assert_array_equal(image.decode(), upright)
    np.testing.assert_array_equal(image.region(20, 30, 100, 120, (100, 120)), upright[20:120, 30:150])


def test_a_png_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Any] = []
    prepare = PngImagePlugin.PngImageFile.load_prepare

    def counted(image: Any) -> None:
        decoded.append(image)
        prepare(image)

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load_prepare", counted)
    image = EncodedImage(encoded(photograph()[:40, :50], "PNG"))
    assert image.size == (40, 50) and image.region(0, 0, 40, 50, (9, 9)).shape == image.decode().shape
    assert len(decoded) == 1


def test_the_orientation_is_found_after_other_metadata_of_any_size() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(photograph(), exif=exif)
    profile = b"\xff\xe2" + struct.pack(">H", 50002) + b"\xff\xda" + bytes(49998)
    assert EncodedImage(data[:2] + 2 * profile + data[2:]).size == EncodedImage(data).size == (640, 427)


@pytest.mark.filterwarnings("ignore:.*EXIF")
@pytest.mark.parametrize("junk", [b"", b"\x00" * 40, b"II*\x00\x08\x00\x00\x00\xff\xff"])
def test_malformed_metadata_does_not_matter(junk: bytes) -> None:
    data = encoded(photograph())
    segment = b"Exif\x00\x00" + junk
    broken = data[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[2:]
    np.testing.assert_array_equal(decode_image(broken), by_pillow(data))


@pytest.mark.parametrize("size", [(1, 1), (1, 20000), (20000, 1), (20, 20000), (7, 3)])
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_tiny_and_very_wide_images_are_decoded(size: tuple[int, int], form: str) -> None:
    pixels = np.arange(size[0] * size[1] * 3, dtype=np.uint8).reshape(*size, 3)
    data = encoded(pixels, form)
    image = EncodedImage(data)
    assert image.size == size
    np.testing.assert_array_equal(image.decode(), by_pillow(data))
    assert min(image.region(0, 0, *size, (1, 1)).shape) >= 1


@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.integers(1, 40),
    st.integers(1, 40),
    st.data(),
    st.sampled_from([1, 3, 6]),
)
def test_a_region_is_never_smaller_than_what_is_needed_of_it(
    height: int, width: int, needed_height: int, needed_width: int, data: st.DataObject, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = (width, height) if orientation == 6 else (height, width)
    image = EncodedImage(encoded(np.zeros((*stored, 3), np.uint8), exif=exif))
    assert image.size == (height, width)
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    own = data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))
    found = image.region(top, left, *own, (needed_height, needed_width)).shape[:2]
    for got, whole, needed in zip(found, own, (needed_height, needed_width)):
        # Of a reduced image whole pixels are taken, so that one may be missing at the border.
        assert min(whole, needed) - 1 <= got <= whole and got >= 1


@pytest.mark.parametrize("reduction", [2, 4, 8])
def test_a_jpeg_decoded_at_a_fraction_is_bit_for_bit_what_pillow_drafts(reduction: int) -> None:
    data = encoded(photograph())
    small = EncodedImage(data).decode(reduction)
    assert small.shape == (-(-427 // reduction), 640 // reduction, 3)
    drafted = Image.open(io.BytesIO(data))
    drafted.draft("RGB", (640 // reduction, 427 // reduction))
    np.testing.assert_array_equal(small, np.asarray(drafted))


def test_a_region_of_a_large_jpeg_is_decoded_at_the_scale_needed() -> None:
    image = EncodedImage(encoded(photograph()))
    assert image.region(0, 0, 427, 640, (100, 100)).shape == (107, 160, 3)
    assert image.region(106, 160, 214, 320, (100, 100)).shape == (107, 160, 3)
    assert image.region(0, 0, 190, 190, (100, 100)).shape == (190, 190, 3)


@pytest.mark.filterwarnings("ignore:.*(EXIF|Truncated)")
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
@given(data=st.data())
def test_a_file_cut_short_is_refused(form: str, data: st.DataObject) -> None:
    whole = encoded(photograph()[:64, :64], form)
    # Behind the last pixels lie a few bytes that nobody needs.
    length = data.draw(st.integers(0, int(len(whole) * 0.95)))
    with pytest.raises(FormatError):
        decode_image(whole[:length])


@given(place=st.integers(0, 3000), bit=st.integers(0, 7), form=st.sampled_from(["JPEG", "PNG", "WEBP"]))
def test_a_damaged_file_is_refused_or_decoded_never_worse(place: int, bit: int, form: str) -> None:
    damaged = bytearray(encoded(photograph()[:64, :64], form))
    damaged[place % len(damaged)] ^= 1 << bit
    try:
        pixels = decode_image(bytes(damaged))
    except FormatError:
        return
    assert pixels.dtype == np.uint8 and pixels.ndim == 3


def _bomb_jpeg() -> bytes:
    data = bytearray(encoded(photograph()))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", 65000, 65000)
    return bytes(data)


def _bomb_png() -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1_000_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("bomb", [_bomb_jpeg, _bomb_png])
def test_a_decompression_bomb_is_refused_by_its_header(bomb: Any) -> None:
    image = EncodedImage(bomb())
    for read in (image.decode, lambda: image.size, lambda: image.region(0, 0, 9, 9, (1, 1))):
        with pytest.raises(FormatError, match="pixels"):
            read()


def _damaged_jpeg() -> bytes:
    damaged = bytearray(encoded(photograph()))
    damaged[len(damaged) // 2 : len(damaged) // 2 + 64] = b"\xff\xd0" * 32
    return bytes(damaged)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda junk=junk: junk, ".") for junk in (b"", b"\xff\xd8\xff", b"hello", bytes(1000))),
        (_damaged_jpeg, "640 x 427 pixels is truncated or corrupt"),
        (
            lambda: encoded(Image.fromarray(np.zeros((4, 5), np.float32)), "TIFF"),
            "floating point; save it with 8 or 16 bits",
        ),
        *(
            (lambda value=value: encoded(Image.fromarray(np.full((4, 5), value, np.int32)), "TIFF"), "of 32 bits")
            for value in (-1, 7, 1 << 16)
        ),
    ],
)
def test_what_is_no_image_of_bytes_is_refused(make: Callable[[], bytes], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decode_image(make())


def test_a_mode_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'RGB'"):
        EncodedImage(b"", "rgb")
