"""Datasets with something to find, and small configs of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from omegaconf import DictConfig

from libai_data.config import LazyCall
from libai_data.delivery.build import build_nlp_train_loader
from libai_data.structures import DistTensorData, Instance
from tests.engine.tiny import tiny_config

WORDS = ["<pad>", "[MASK]", "<script>alert(1)</script>", "cat & dog", *(f"w{number}" for number in range(4, 20))]
LENGTH = 12


class Words:
    """A tokenizer of 20 words, one of which would be a script."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(WORDS[number] for number in ids)


class Sentences:
    """Sentences of 4 to 11 words, padded to 12, with masked words that the loss counts.

    Args:
        tokenizer: given to each dataset of a config that has one.
    """

    def __init__(self, length: int = 40, tokenizer: Any = None) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Instance:
        there = np.arange(LENGTH) < 4 + index % 8
        counted = there & (np.arange(LENGTH) % 3 == 0)
        words = np.where(there, 2 + (index + np.arange(LENGTH)) % 18, 0)
        tokens = np.where(counted, 1, words)
        layout = ["split_0", "split_1"]
        return Instance(
            input_ids=DistTensorData(tokens.astype(np.int64), layout),
            attention_mask=DistTensorData(there.astype(np.int64), layout),
            loss_mask=DistTensorData(counted.astype(np.int64), placement_idx=-1),
            labels=DistTensorData(np.where(counted, words, -1).astype(np.int64), placement_idx=-1),
        )


class Planted:
    """Samples with what should be found.

    Args:
        what: the fault, or "" for none.
    """

    def __init__(self, what: str = "", length: int = 8) -> None:
        self.what, self.length = what, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        bad = index == 3
        same = 0 if self.what == "duplicate" and index == 5 else index
        points = np.random.default_rng(same).standard_normal(4).astype(np.float32)
        if bad and self.what in ("nan", "inf"):
            points[1] = np.nan if self.what == "nan" else -np.inf
        label = {"label": 7, "negative": -1}.get(self.what, same % 3) if bad else same % 3
        scale = np.float32(2.5 if self.what == "constant" else same)
        tokens = np.arange(6) + (same % 4) + (50 if bad and self.what == "token" else 0)
        return {"points": points, "labels": np.int64(label), "scale": scale, "input_ids": tokens}


def config_with(dataset: Any, batch: int = 8, collate_fn: Any | None = None, **dist: Any) -> DictConfig:
    """A config whose step is one batch of this dataset (a LazyCall); the model has 3 classes and 20 tokens."""
    cfg = tiny_config("unused", global_batch_size=batch)
    cfg.dataloader.train = LazyCall(build_nlp_train_loader)(dataset=dataset, num_workers=0, collate_fn=collate_fn)
    cfg.dataloader.test[0].dataset = dataset
    cfg.model = {"num_classes": 3, "vocab_size": 20}
    cfg.train.dist.update(dist)
    return cfg


class Compose:
    """Transforms one after the other, as flowvision has them."""

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value
