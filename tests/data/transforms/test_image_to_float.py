from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from libai_data.errors import ConfigError, SchemaError
from libai_data.data.transforms import ImageToFloat

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


@given(images)
def test_by_default_pixels_become_zero_to_one_and_nothing_is_lost(image: np.ndarray) -> None:
    found = ImageToFloat()(image)
    assert found.min() >= 0
    assert found.max() <= 1
    np.testing.assert_array_equal(np.round(found * 255).astype(np.uint8).transpose(1, 2, 0), image)


def test_grey_and_pillow_images_are_taken() -> None:
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3)
    np.testing.assert_array_equal(ImageToFloat()(grey), ImageToFloat()(grey[:, :, None]))
    np.testing.assert_array_equal(ImageToFloat()(Image.fromarray(grey)), ImageToFloat()(grey))


def test_the_image_is_left_as_it_was() -> None:
    image = np.full((2, 2, 3), 255, dtype=np.uint8)
    ImageToFloat(mean=(0.5,), std=(0.5,))(image)
    assert (image == 255).all()


@pytest.mark.parametrize("image", [np.zeros((2, 2)), np.zeros(4, np.uint8), np.zeros((1, 2, 2, 3), np.uint8)])
def test_other_images_are_refused_with_dtype_and_shape(image: Any) -> None:
    with pytest.raises(SchemaError, match=r"expected uint8 \[H, W\] or \[H, W, C\]"):
        ImageToFloat()(image)


def test_means_and_deviations_for_other_channels_are_refused_with_the_numbers() -> None:
    grey = np.zeros((2, 2), np.uint8)
    with pytest.raises(SchemaError, match="1 channels, but mean has 3"):
        ImageToFloat(mean=(0.5, 0.5, 0.5))(grey)
    with pytest.raises(SchemaError, match="1 channels, but std has 3"):
        ImageToFloat(std=(0.5, 0.5, 0.5))(grey)


@pytest.mark.parametrize("std", [(0.0,), (1.0, -1.0, 1.0)])
def test_a_deviation_that_is_not_above_zero_is_refused(std: Any) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        ImageToFloat(std=std)
