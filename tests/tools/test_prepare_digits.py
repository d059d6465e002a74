"""The digits of the example."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tools.prepare_digits import write_digits


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "digits"
    assert write_digits(root)
    return root


def test_a_picture_is_that_of_scikit_learn(digits: Path) -> None:
    from sklearn.datasets import load_digits

    source = load_digits()
    for number in (0, 1, 7, 1796):
        part = "test" if number % 5 == 0 else "train"
        with Image.open(digits / part / str(source.target[number]) / f"{number:04d}.png") as image:
            pixels = np.asarray(image)
        assert pixels.dtype == np.uint8
        np.testing.assert_allclose(pixels * (16 / 255), source.images[number], atol=0.04)
