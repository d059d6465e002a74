from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from configs.models.gpt import GPT
from configs.models.vit import VisionTransformer
from libai_data.errors import ConfigError
from tests.models.placing import placed


def small_vit() -> VisionTransformer:
    return VisionTransformer(image_size=8, patch_size=4, in_channels=3, num_classes=7, dim=8, depth=1, num_heads=2)


def images() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


def test_patches_are_cut_row_by_row() -> None:
    pictures = images()
    patches = small_vit().patches(placed(pictures)).numpy()
    assert patches.shape == (2, 4, 48)
    np.testing.assert_array_equal(patches[1, 2], pictures[1, :, 4:8, 0:4].ravel())


def test_training_gives_a_loss_and_evaluation_gives_scores() -> None:
    model = small_vit()
    labels = placed(np.array([1, 6]))
    loss = model.train()(placed(images()), labels)
    assert list(loss) == ["losses"]
    assert loss["losses"].shape == ()
    for scores in (model.eval()(placed(images()), labels), model(placed(images()))):
        assert list(scores) == ["prediction_scores"]
        assert scores["prediction_scores"].shape == (2, 7)


def test_an_image_does_not_depend_on_the_others_of_its_batch() -> None:
    model = small_vit().eval()
    pictures = images()
    both = model(placed(pictures))["prediction_scores"].numpy()
    alone = model(placed(pictures[1:]))["prediction_scores"].numpy()
    np.testing.assert_allclose(both[1:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", [VisionTransformer, GPT])
def test_a_size_that_no_model_can_have_is_refused_before_oneflow_makes_a_tensor(model: Any) -> None:
    with pytest.raises(ConfigError, match="dim is -1; it must be an int, at least 1"):
        model(dim=-1)


def test_a_patch_that_does_not_divide_the_image_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="patch_size is 3, which does not divide image_size=8"):
        VisionTransformer(image_size=8, patch_size=3)
