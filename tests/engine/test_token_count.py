"""Real tokens are counted: padding is not, and a resumed training continues the count."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from libai_data.config import LazyCall
from libai_data.engine.token_count import TokenCounter, tokens_per_sample
from libai_data.loader import PadCollator
from libai_data.structures import DistTensorData, Instance
from tests.engine.data_runs import config_of, metric, train
from tests.engine.tiny import TinyDataset, TinyModel


class Sentences(TinyDataset):
    """Points with 1 to 5 tokens each."""

    def __getitem__(self, index: int) -> Instance:
        sample = super().__getitem__(index)
        length = 1 + index % 5
        sample.set("input_ids", DistTensorData(np.full(length, index)))
        sample.set("attention_mask", DistTensorData(np.ones(length, np.int64)))
        return sample


class Reader(TinyModel):
    """Takes tokens, and looks at the points."""

    def forward(self, points: Any, labels: Any = None, input_ids: Any = None, attention_mask: Any = None) -> Any:
        return super().forward(points, labels)


@pytest.mark.parametrize("sizes", [{}, {"train_micro_batch_size": 2}])
def test_padding_is_not_counted_and_a_resume_continues_the_count(sizes: dict[str, Any], tmp_path: Path) -> None:
    def config() -> Any:
        cfg = config_of(tmp_path, log_period=4, checkpointer={"period": 3}, **sizes)
        cfg.dataloader.train.dataset._target_ = Sentences
        cfg.dataloader.train.collate_fn = LazyCall(PadCollator)(
            fields={"input_ids": {"value": 0}, "attention_mask": {"value": 0}}
        )
        cfg.model._target_ = Reader
        return cfg

    # After step 5: a checkpoint whose tokens no logging step has read.
    steps = train(config(), stop_after=6).steps
    steps.update(train(config(), resume=True).steps)
    lengths = np.cumsum([sum(1 + index % 5 for index in steps[step]) for step in range(12)])
    assert metric(tmp_path, "consumed_tokens") == {step: lengths[step] for step in (3, 7, 11)}
    speed, time = metric(tmp_path, "tokens_per_second"), metric(tmp_path, "time")
    assert speed[11] == pytest.approx((lengths[11] - lengths[7]) / (4 * time[11]))
    assert f"tokens {lengths[11]}" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("mask", "tokens"),
    [
        ({"attention_mask": [[True, True, False], [True, False, False]]}, 3),
        ({"segment_ids": [[1, 1, 2], [1, 2, 0]]}, 5),
        # Of a passage each token sees each; as a matrix, only the mask of an encoder is known to be so.
        ({"encoder_attn_mask": [np.outer(real, real) for real in ([1, 1, 0], [1, 0, 0])]}, 3),
        ({"attention_mask": np.tril(np.ones((2, 3, 3)))}, 6),
        # Of packed documents: two of one token, and one of two.
        ({"cu_seqlens": np.array([[0, 1, 2, 2], [0, 2, 2, 2]], np.int32)}, 4),
        ({}, 6),
    ],
)
def test_the_inputs_say_which_tokens_are_real(mask: dict[str, Any], tokens: int) -> None:
    counter = TokenCounter(SimpleNamespace(collates=False))
    for _ in range(2):
        inputs = {"input_ids": np.zeros((2, 3), np.int64), **{name: np.array(value) for name, value in mask.items()}}
        counter.add({name: flow.from_numpy(value) for name, value in inputs.items()})
    assert counter.take(4, 2) == (2 * tokens, tokens if counter.state_dict() == {"tokens": 0} else 2 * tokens)


def test_without_a_mask_tokens_are_those_of_the_field_that_is_called_so_unless_a_collator_may_pad() -> None:
    inputs = {"images": np.zeros((4, 3, 8)), "input_ids": np.zeros((4, 128))}
    assert tokens_per_sample(SimpleNamespace(collates=False), inputs) == 128
    assert tokens_per_sample(SimpleNamespace(collates=True), inputs) == 0
    assert tokens_per_sample(SimpleNamespace(collates=False), {"images": inputs["images"]}) == 0
    assert tokens_per_sample([], inputs) == 0
