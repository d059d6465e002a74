"""Each operation is held against Pillow's, on a photograph."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image, ImageEnhance, ImageOps

from libai_data.data.transforms import operations
from libai_data.data.transforms.rand_augment import OPERATIONS
from tests.data.transforms.pictures import photograph

IMAGE = Image.fromarray(photograph())
PICTURES = arrays.arrays(np.uint8, st.sampled_from([(5, 7, 3), (5, 7), (1, 1, 3), (2, 9, 3), (40, 30, 3)]))


def difference(found: np.ndarray, expected: Any) -> np.ndarray:
    assert found.dtype == np.uint8
    return np.abs(found.astype(int) - np.asarray(expected))


@given(PICTURES)
def test_operations_by_tables_are_bit_for_bit_pillows(pixels: np.ndarray) -> None:
    image = Image.fromarray(pixels)
    for ours, theirs in [
        (operations.autocontrast(pixels), ImageOps.autocontrast(image)),
        (operations.equalize(pixels), ImageOps.equalize(image)),
        (operations.solarize(pixels, 100), ImageOps.solarize(image, 100)),
        (operations.posterize(pixels, 3), ImageOps.posterize(image, 3)),
    ]:
        np.testing.assert_array_equal(ours, np.asarray(theirs))


@pytest.mark.parametrize("factor", [0.0, 0.1, 0.55, 1.0, 1.3, 1.9])
@pytest.mark.parametrize(
    ("operation", "enhance"),
    [
        (operations.brightness, ImageEnhance.Brightness),
        (operations.contrast, ImageEnhance.Contrast),
        (operations.colour, ImageEnhance.Color),
        (operations.sharpness, ImageEnhance.Sharpness),
    ],
)
def test_enhancements_are_within_two_levels_of_pillows(
    operation: Callable[..., Any], enhance: Any, factor: float
) -> None:
    for image in (IMAGE, IMAGE.convert("L")):
        found = difference(operation(np.asarray(image), factor), enhance(image).enhance(factor))
        assert found.max() <= 2 and found.mean() < 0.6


@pytest.mark.parametrize("turn", [-0.5, -0.1, 0.0, 0.2])
def test_hues_are_those_of_flowvision_within_three_levels_on_the_average(turn: float) -> None:
    import oneflow  # noqa: F401
    from flowvision.transforms import functional

    assert difference(operations.hue(photograph(), turn), functional.adjust_hue(IMAGE, turn)).mean() < 3


@pytest.mark.parametrize(
    ("operation", "amount", "matrix"),
    [
        (operations.shear, {"x": 0.3}, (1, 0.3, 0, 0, 1, 0)),
        (operations.shear, {"y": -0.2}, (1, 0, 0, -0.2, 1, 0)),
        (operations.translate, {"x": 0.25}, (1, 0, 160, 0, 1, 0)),
        (operations.translate, {"y": -0.5}, (1, 0, 0, 0, 1, -213.5)),
    ],
)
def test_shapes_are_those_of_pillow_within_two_levels(operation: Any, amount: dict[str, float], matrix: Any) -> None:
    expected = IMAGE.transform(
        IMAGE.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=operations.FILL
    )
    _check_shape(operation(photograph(), **amount), expected)


@pytest.mark.parametrize("degrees", [-30, 10, 90])
def test_turns_are_those_of_pillow_within_two_levels(degrees: float) -> None:
    expected = IMAGE.rotate(degrees, Image.Resampling.BILINEAR, fillcolor=operations.FILL)
    _check_shape(operations.rotate(photograph(), degrees), expected)


def _check_shape(found: np.ndarray, expected: Any) -> None:
    apart = difference(found, expected)
    # At the border of the picture, OpenCV blends with the fill colour, and Pillow does not.
    assert np.mean(apart > 8) < 0.02 and np.median(apart) <= 1 and apart.mean() < 2


@given(PICTURES, st.sampled_from(sorted(OPERATIONS)), st.floats(0, 1), st.sampled_from([-1.0, 1.0]))
def test_operations_keep_the_form_and_change_nothing_in_place(
    pixels: np.ndarray, name: str, strength: float, sign: float
) -> None:
    before = pixels.copy()
    made = OPERATIONS[name](pixels, strength, sign)
    assert made.shape == pixels.shape and made.dtype == np.uint8
    np.testing.assert_array_equal(pixels, before)


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - {"AutoContrast", "Equalize"}))
def test_strength_zero_changes_nothing_and_one_does(name: str) -> None:
    np.testing.assert_array_equal(OPERATIONS[name](photograph(), 0.0, 1.0), photograph())
    if name != "Identity":
        assert difference(OPERATIONS[name](photograph(), 1.0, -1.0), photograph()).mean() > 1


def test_the_operations_are_the_fourteen_of_the_paper() -> None:
    assert len(OPERATIONS) == 14
