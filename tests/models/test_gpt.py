from __future__ import annotations

from typing import Any, Iterator

import numpy as np
import pytest

from libai_data.errors import ConfigError
from libai_data.mesh import ParallelMesh, set_mesh

import oneflow as flow  # isort: skip

from configs.models.gpt import GPT


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    set_mesh(ParallelMesh(1, 1, 1))
    yield
    set_mesh(None)


def placed(array: np.ndarray) -> Any:
    return flow.tensor(array, placement=flow.placement("cpu", [0]), sbp=[flow.sbp.broadcast])


def small_gpt() -> GPT:
    return GPT(vocab_size=11, max_seq_length=6, dim=8, depth=2, num_heads=2)


def tokens(length: int = 5) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 11, (2, length))


def test_a_token_changes_no_score_before_it() -> None:
    model = small_gpt().eval()
    before = tokens()
    after = before.copy()
    after[:, 3] = (after[:, 3] + 1) % 11
    first, second = (model(placed(ids))["prediction_scores"].numpy() for ids in (before, after))
    np.testing.assert_allclose(first[:, :3], second[:, :3], rtol=1e-5, atol=1e-6)
    assert np.abs(first[:, 3:] - second[:, 3:]).max(axis=(0, 2)).min() > 1e-3


def test_training_gives_a_loss_and_evaluation_scores_and_with_labels_the_loss_too() -> None:
    model = small_gpt()
    ids = placed(tokens())
    trained = model.train()(ids, ids)
    assert list(trained) == ["losses"]
    evaluated = model.eval()(ids, ids)
    assert evaluated["prediction_scores"].shape == (2, 5, 11)
    np.testing.assert_allclose(evaluated["losses"].numpy(), trained["losses"].numpy(), rtol=1e-5)
    assert list(model(ids)) == ["prediction_scores"]


def test_a_sequence_that_is_too_long_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="input_ids has 7 tokens, but the model's max_seq_length is 6"):
        small_gpt()(placed(tokens(7)))
