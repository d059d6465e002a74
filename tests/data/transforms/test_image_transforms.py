"""Transforms of one image: near to Pillow's, and each sample's own draws."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from libai_data.data.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    EncodedImage,
    ImageToFloat,
    RandAugment,
    RandomErasing,
    RandomFlip,
    RandomResizedCrop,
    RandomTransform,
    Resize,
)
from libai_data.data.transforms.geometry import resized
from libai_data.data.transforms.pipeline import transform_into, transform_stages
from libai_data.errors import ConfigError, FormatError, SchemaError
from tests.data.transforms.pictures import as_sample, encoded, photograph
from tests.deadline import run_to_end

RANDOM: list[RandomTransform] = [
    RandomResizedCrop(32),
    RandomFlip(),
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    RandAugment(2, 9),
    RandomErasing(0.5, value="random"),
]


@pytest.mark.parametrize(
    ("size", "mean", "most"), [((300, 300), 2.5, 60), ((224, 224), 3, 80), ((100, 150), 4.5, 130), ((600, 900), 0.5, 2)]
)
def test_resizing_is_near_pillows(size: tuple[int, int], mean: float, most: int) -> None:
    # Levels of 255, on a photograph full of edges. Enlarged, there is nothing to choose, and it is the same within 2.
    expected = np.asarray(Image.fromarray(photograph()).resize(size[::-1], Image.Resampling.BILINEAR))
    apart = np.abs(resized(photograph(), size).astype(int) - expected)
    assert apart.mean() < mean and apart.max() <= most


def test_resizing_does_not_alias() -> None:
    stripes = np.zeros((200, 200, 3), np.uint8)
    stripes[::2] = 255
    for size in ((70, 200), (110, 200), (150, 200), (70, 300)):
        # Rows that were taken one by one would be black or white.
        middle = resized(stripes, size)[5:-5]
        assert middle.min() >= 40 and middle.max() <= 215


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.integers(1, 40), st.sampled_from(["RGB", "L"]))
def test_any_image_is_resized_to_any_size(height: int, width: int, to_height: int, to_width: int, mode: str) -> None:
    pixels = np.full((height, width, 3) if mode == "RGB" else (height, width), 77, np.uint8)
    for image in (pixels, Image.fromarray(pixels), EncodedImage(encoded(pixels), mode)):
        made = Resize((to_height, to_width))(image)
        assert made.shape == (to_height, to_width, *pixels.shape[2:])
        assert np.abs(made.astype(int) - 77).max() <= 1
        shorter = Resize(9)(image)
        assert min(shorter.shape[:2]) == 9
        drawn = as_sample(RandomResizedCrop((to_height, to_width)), image)
        assert drawn.shape == made.shape


@pytest.mark.parametrize("pixels", [(1, 1, 3), (1, 20000, 3), (20, 20000, 3)])
def test_tiny_and_very_wide_images_come_out_in_the_size_asked_for(pixels: tuple[int, int, int]) -> None:
    image = EncodedImage(encoded(np.zeros(pixels, np.uint8)))
    transform = Compose([*RANDOM[:4], Resize(40), CenterCrop(36), ImageToFloat()])
    assert as_sample(transform, image).shape == (3, 36, 36)
    assert as_sample(Compose([Resize(36), CenterCrop(36)]), image).shape == (36, 36, 3)


@pytest.mark.parametrize("size", [100, (30, 50), (427, 640)])
def test_the_middle_is_cut_out_as_flowvision_does(size: Any) -> None:
    import oneflow  # noqa: F401
    from flowvision import transforms

    expected = transforms.CenterCrop(size)(Image.fromarray(photograph()))
    np.testing.assert_array_equal(CenterCrop(size)(photograph()), np.asarray(expected))


def test_what_is_smaller_than_the_crop_is_framed_in_black() -> None:
    made = CenterCrop((4, 6))(np.full((2, 3), 9, np.uint8))
    assert made.tolist() == [[0] * 6, [0, 9, 9, 9, 0, 0], [0, 9, 9, 9, 0, 0], [0] * 6]


def test_regions_keep_to_the_scale_and_ratio_and_lie_anywhere() -> None:
    generator = np.random.default_rng(0)
    transform = RandomResizedCrop(8, scale=(0.2, 0.5), ratio=(0.5, 2.0))
    drawn = np.array([transform.region(400, 300, generator) for _ in range(2000)])
    top, left, height, width = drawn.T
    area = height * width / (400 * 300)
    assert area.min() > 0.19 and area.max() < 0.51 and abs(area.mean() - 0.35) < 0.02
    assert (width / height).min() > 0.48 and (width / height).max() < 2.05
    assert (top + height).max() == 400 and (left + width).max() == 300 and top.min() == 0 and left.min() == 0


def test_where_no_region_fits_the_middle_is_taken() -> None:
    region = RandomResizedCrop(8, scale=(1.0, 1.0)).region(10, 1000, np.random.default_rng(0))
    assert region == (0, 493, 10, 13)


def test_a_jpeg_cropped_while_it_is_decoded_is_near_what_comes_of_its_pixels() -> None:
    data = encoded(photograph())
    for index in range(20):
        # At an eighth, a region that begins between two pixels is off by up to half of one.
        transform = RandomResizedCrop(64)
        direct = as_sample(transform, EncodedImage(data), index).astype(int)
        assert np.abs(direct - as_sample(transform, EncodedImage(data).decode(), index)).mean() < 12


def test_flips_are_exact_and_as_often_as_asked() -> None:
    flipped = [np.array_equal(as_sample(RandomFlip(0.3), photograph(), i), photograph()[:, ::-1]) for i in range(300)]
    assert 60 < sum(flipped) < 120
    np.testing.assert_array_equal(as_sample(RandomFlip(1.0, vertical=True), photograph()), photograph()[::-1])


@pytest.mark.parametrize("transform", RANDOM, ids=lambda transform: type(transform).__name__)
def test_what_is_drawn_depends_on_seed_epoch_and_index_alone(transform: RandomTransform) -> None:
    pixels = photograph()[:60, :80]
    before = pixels.copy()
    made = [as_sample(transform, pixels, index) for index in range(8)]
    random.random()
    np.random.random()
    for index in (5, 0, 3):
        np.testing.assert_array_equal(as_sample(transform, pixels, index), made[index])
    for other in ({"epoch": 1}, {"seed": 2}):
        assert any(not np.array_equal(as_sample(transform, pixels, i, **other), made[i]) for i in range(8))
    np.testing.assert_array_equal(pixels, before)


@pytest.mark.parametrize("value", [7, (1, 2, 3), "random"])
def test_erasing_changes_one_box_and_nothing_else(value: Any) -> None:
    for image in (photograph(), ImageToFloat()(photograph())):
        made = as_sample(RandomErasing(1.0, value=value), image, 3)
        changed = (made != image).any(axis=2 if image.dtype == np.uint8 else 0)
        rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
        area = len(rows) * len(columns) / changed.size
        assert 0.018 < area < 0.34 and changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].mean() > 0.95
        if value == (1, 2, 3):
            inside = (made if image.dtype == np.uint8 else made.transpose(1, 2, 0))[rows[0], columns[0]]
            assert inside.tolist() == [1, 2, 3]


def test_float_pixels_are_written_straight_into_their_row() -> None:
    transform = Compose([*RANDOM[:2], ImageToFloat([0.5], [0.5])])
    rows = np.zeros((2, 3, 32, 32), np.float32)
    expected = as_sample(transform, photograph())
    as_sample(lambda image: transform_into(transform, image, rows[1], "images"), photograph())
    np.testing.assert_array_equal(rows[1], expected)
    assert not rows[0].any()
    made = as_sample(lambda image: transform(image, rows[0]), photograph())
    assert np.shares_memory(transform(photograph(), rows[0]), rows) and made.shape == (3, 32, 32)


def test_what_follows_the_floats_is_written_too() -> None:
    transform = Compose([Resize((8, 9)), ImageToFloat(), RandomErasing(1.0, value=5.0)])
    row = np.zeros((3, 8, 9), np.float32)
    as_sample(lambda image: transform_into(transform, image, row, "images"), photograph())
    np.testing.assert_array_equal(row, as_sample(transform, photograph()))
    assert (row == 5).any()


def test_images_of_different_sizes_are_refused_with_the_field() -> None:
    for transform in (Compose([ImageToFloat()]), ImageToFloat(), np.asarray):
        with pytest.raises(SchemaError, match=r"field 'images' is .*427.* before it float32 \[3, 4, 5\]"):
            transform_into(transform, photograph(), np.zeros((3, 4, 5), np.float32), "images")


def test_stages_show_what_training_sees() -> None:
    transform = Compose([*RANDOM, np.copy])
    names, made = zip(*as_stages(transform))
    assert names == (*(type(part).__name__ for part in RANDOM), "copy")
    np.testing.assert_array_equal(made[-1], as_sample(transform, photograph()))


def as_stages(transform: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    as_sample(lambda image: found.extend(transform_stages(transform, image)), photograph())
    return found


def test_compositions_within_others_draw_in_turn_too() -> None:
    flat = Compose(RANDOM)
    nested = Compose([RANDOM[0], Compose([*RANDOM[1:3], Compose([np.copy])]), *RANDOM[3:]])
    for index in range(4):
        np.testing.assert_array_equal(as_sample(nested, photograph(), index), as_sample(flat, photograph(), index))


@pytest.mark.parametrize("transform", [*RANDOM, Resize(3), CenterCrop(3)], ids=lambda part: type(part).__name__)
def test_what_is_no_image_is_refused(transform: Any) -> None:
    for image in (np.zeros((2, 2), np.float64), np.zeros((2, 2, 4), np.uint8), np.zeros((0, 5, 3), np.uint8)):
        with pytest.raises(SchemaError, match="the image is"):
            as_sample(transform, image)
    with pytest.raises(FormatError):
        as_sample(transform, EncodedImage(encoded(photograph())[:100]))


@pytest.mark.parametrize(
    ("make", "arguments", "names"),
    [
        (Compose, {"transforms": []}, "transforms"),
        (Resize, {"size": 0}, "size"),
        (Resize, {"size": (3, 4, 5)}, "size"),
        (CenterCrop, {"size": -1}, "size"),
        (RandomResizedCrop, {"size": 3, "scale": (0.5, 0.1)}, "scale"),
        (RandomResizedCrop, {"size": 3, "ratio": (0, 1)}, "ratio"),
        (RandomFlip, {"p": 2}, "p is 2"),
        (ColorJitter, {"brightness": -1}, "brightness"),
        (ColorJitter, {"hue": 0.6}, "hue"),
        (RandomErasing, {"value": "pixel"}, "value"),
        (RandomErasing, {"scale": (0.5,)}, "scale"),
        (RandAugment, {"number": -1}, "number"),
        (RandAugment, {"magnitude": 11}, "magnitude"),
        (ImageToFloat, {"mean": (0, 0, 0), "std": (1, 1)}, "mean has 3 values, and std has 2"),
    ],
)
def test_arguments_out_of_range_are_refused(make: Any, arguments: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        make(**arguments)


def test_neither_transforms_nor_decoding_import_oneflow_and_opencv_has_one_thread() -> None:
    code = (
        "import sys, cv2, numpy as np; from libai_data.data.transforms import *\n"
        "Compose([RandomResizedCrop(8), RandAugment(), ColorJitter(.1), RandomFlip(), ImageToFloat()])"
        "(np.zeros((9, 9, 3), np.uint8)); from libai_data.data.transforms import decode\n"
        "print(cv2.getNumThreads(), 'oneflow' in sys.modules)"
    )
    assert run_to_end([sys.executable, "-c", code], check=True).stdout == "1 False\n"


images = hnp.arrays(np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 3, 4])))
floats = st.floats(-1, 1, width=32)


@given(images, st.data())
def test_each_channel_is_scaled_shifted_and_put_first(image: np.ndarray, data: st.DataObject) -> None:
    channels = image.shape[2]
    count = data.draw(st.sampled_from([1, channels]))
    mean: list[float] = data.draw(st.lists(floats, min_size=count, max_size=count))
    std: list[float] = data.draw(st.lists(st.floats(0.125, 4, width=32), min_size=count, max_size=count))
    found = ImageToFloat(mean, std)(image)
    assert found.dtype == np.float32
    expected = ((image / 255.0 - np.array(mean)) / np.array(std)).transpose(2, 0, 1)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_grey_and_pillow_images_are_taken() -> None:
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3)
    np.testing.assert_array_equal(ImageToFloat()(grey), ImageToFloat()(grey[:, :, None]))
    np.testing.assert_array_equal(ImageToFloat()(Image.fromarray(grey)), ImageToFloat()(grey))


GREY = np.zeros((2, 2), np.uint8)


@pytest.mark.parametrize(
    ("arguments", "image", "message"),
    [
        *(
            ({}, image, r"expected uint8 \[H, W\] or \[H, W, C\]")
            for image in (np.zeros((2, 2)), np.zeros(4, np.uint8), np.zeros((1, 2, 2, 3), np.uint8))
        ),
        ({"mean": (0.5, 0.5, 0.5)}, GREY, "1 channels, but mean has 3"),
        ({"std": (0.5, 0.5, 0.5)}, GREY, "1 channels, but std has 3"),
        ({"std": (0.0,)}, GREY, "above 0"),
        ({"std": (1.0, -1.0, 1.0)}, GREY, "above 0"),
    ],
)
def test_what_cannot_become_floats_is_refused_with_the_numbers(arguments: Any, image: Any, message: str) -> None:
    with pytest.raises((SchemaError, ConfigError), match=message):
        ImageToFloat(**arguments)(image)


def test_transforms_touch_no_global_state() -> None:
    before = random.getstate(), str(np.random.get_state(legacy=False))
    as_sample(Compose(RANDOM), photograph())
    assert (random.getstate(), str(np.random.get_state(legacy=False))) == before


class Sevens(ImageToFloat):
    """Makes floats of its own."""

    def __call__(self, image: Any) -> np.ndarray:  # type: ignore[override]
        return np.full_like(super().__call__(image), 7)


class Fives(Compose):
    """A composition that changes what comes of it."""

    def __call__(self, image: Any) -> Any:  # type: ignore[override]
        return super().__call__(image) * 0 + 5


class Noting:
    """A transform that also writes, but no images."""

    def __call__(self, image: Any) -> Any:
        return image

    def write(self, line: str) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("transform", "level"),
    [
        (Compose([Sevens()]), 7),
        (Compose([RandomFlip(), Sevens(), Noting()]), 7),
        (Fives([RandomFlip(), ImageToFloat()]), 5),
        (Compose([Noting(), Fives([ImageToFloat()])]), 5),
    ],
    ids=["floats", "last but one", "composition", "within a composition"],
)
def test_a_call_of_a_subclass_decides_what_is_written(transform: Any, level: int) -> None:
    out = np.zeros((3, 8, 8), np.float32)
    transform_into(transform, np.zeros((8, 8, 3), np.uint8), out, "images")
    assert np.unique(out).tolist() == [level]


def test_a_class_in_place_of_a_transform_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"transforms\[1\] is the class RandomFlip; pass an object of it, RandomFlip\("
    ):
        Compose([Resize(8), RandomFlip])
    assert Compose([Resize(8), np.asarray, np.ndarray.copy])(np.zeros((9, 9, 3), np.uint8)).shape == (8, 8, 3)


@pytest.mark.parametrize("make", [lambda kind: kind(), lambda kind: Compose([kind()])])
def test_a_random_transform_with_a_call_of_its_own_is_refused_in_a_composition(make: Any) -> None:
    class Undecided(RandomFlip):
        def __call__(self, image: Any) -> np.ndarray:
            return np.asarray(image)

    with pytest.raises(ConfigError, match=r"transforms\[1\] is a Undecided with a __call__ of its own.*override apply"):
        Compose([ImageToFloat(), Undecided()])
    with pytest.raises(ConfigError, match=r"transforms\[0\] is a Fives with a __call__ of its own"):
        Compose([Fives([make(RandomFlip)])])


@pytest.mark.parametrize("transform", [Resize(3), RandomFlip(), ImageToFloat()])
def test_an_image_with_a_palette_is_refused_with_the_ways_to_convert_it(transform: Any) -> None:
    picture = Image.fromarray(photograph()).quantize(8)
    with pytest.raises(SchemaError, match=r"has a palette \(mode 'P'\); convert it, as by image.convert\('RGB'\), or"):
        as_sample(transform, picture)
    assert as_sample(transform, np.asarray(picture)).size


def test_an_array_whose_rows_are_apart_is_not_used_for_floats_but_filled_by_a_copy() -> None:
    out = np.zeros((3, 8, 16), np.float32)[:, :, ::2]
    pixels = np.full((8, 8, 3), 255, np.uint8)
    assert ImageToFloat()(pixels, out) is not out
    transform_into(Compose([ImageToFloat()]), pixels, out, "images")
    assert np.unique(out).tolist() == [1]


def test_an_image_without_pixels_does_not_become_floats() -> None:
    with pytest.raises(SchemaError, match=r"the image is uint8 \[0, 5, 3\]"):
        ImageToFloat()(np.zeros((0, 5, 3), np.uint8))


@pytest.mark.parametrize("value", [300, -1, [0.0, 255.0, 256.0], np.nan])
def test_a_filling_that_no_level_can_hold_is_refused(value: Any) -> None:
    with pytest.raises(SchemaError, match=r"the levels of a uint8 image are 0 to 255"):
        RandomErasing(1.0, value=value)(np.zeros((64, 64, 3), np.uint8))
