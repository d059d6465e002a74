from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.models.gpt import GPT
from libai_data.data.datasets import GPTDataset
from libai_data.data.sources import IndexedWriter
from libai_data.engine.evaluation import PerplexityEvaluator
from libai_data.errors import ConfigError
from tests.models.placing import placed


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


def samples_of(tmp_path: Path, **options: Any) -> dict[str, Any]:
    """A batch of two samples of 6 tokens, cut from or packed of documents of 3 to 5 tokens."""
    with IndexedWriter(tmp_path / "corpus") as writer:
        for length in (4, 4, 5, 3, 5):
            writer.add_document([np.random.default_rng(length).integers(0, 11, length)])
    dataset = GPTDataset(tmp_path / "corpus", 6, **options)
    found = [dataset[index].get_fields() for index in range(2)]
    return {name: np.stack([fields[name].tensor for fields in found]) for name in found[0]}


@pytest.mark.parametrize("options", [{"packing": True}, {"reset_position_ids": True, "reset_attention_mask": True}])
def test_the_tokens_of_a_document_are_predicted_as_if_it_were_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    batch = samples_of(tmp_path, **options)
    model = small_gpt().eval()
    together = model(**{name: placed(array) for name, array in batch.items()})["prediction_scores"].numpy()
    documents = 0
    for row, positions in enumerate(batch["position_ids"]):
        starts = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
        for first, end in zip(starts, starts[1:]):
            alone = model(placed(batch["input_ids"][row : row + 1, first:end]))["prediction_scores"].numpy()
            np.testing.assert_allclose(together[row : row + 1, first:end], alone, rtol=1e-4, atol=1e-5)
            documents += end - first > 1
    assert documents >= 4


def test_only_what_the_loss_mask_counts_is_in_the_loss_and_the_evaluation(tmp_path: Path) -> None:
    batch = samples_of(tmp_path, eod_mask_loss=True)
    assert 0 < (batch["loss_mask"] == 0).sum() < 6
    model = small_gpt().eval()
    inputs = {name: placed(array) for name, array in batch.items()}
    outputs = model(**inputs)
    scores = outputs["prediction_scores"].numpy()
    log_probabilities = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    losses = -np.take_along_axis(log_probabilities, batch["labels"][..., None], -1)[..., 0]
    expected = losses[batch["loss_mask"] == 1].mean()
    np.testing.assert_allclose(outputs["losses"].numpy(), expected, rtol=1e-5)
    evaluator = PerplexityEvaluator()
    evaluator.process(inputs, evaluator.prepare(inputs, outputs))
    np.testing.assert_allclose(evaluator.evaluate()["loss"], expected, rtol=1e-5)
    nothing = {**inputs, "loss_mask": placed(np.zeros_like(batch["loss_mask"]))}
    assert model(**nothing)["losses"].numpy() == 0


def test_two_arguments_that_say_what_tokens_see_and_too_many_tokens_are_refused() -> None:
    ids = placed(tokens())
    with pytest.raises(ConfigError, match="attention_mask, cu_seqlens and segment_ids"):
        small_gpt()(ids, attention_mask=ids, cu_seqlens=ids)
    with pytest.raises(ConfigError, match="input_ids has 7 tokens, but the model's max_seq_length is 6"):
        small_gpt()(placed(tokens(7)))
