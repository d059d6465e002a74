"""What the ranks of `evaluate_on_meshes.py` evaluate; the test computes the truth from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from libai_data.structures import DistTensorData, Instance

VOCABULARY, LENGTH = 11, 6
MICRO_BATCH = 2


class Case(NamedTuple):
    """One evaluation on each mesh."""

    samples: int
    readers: str = "every_rank"
    eval_iter: float = 1e5
    workers: int = 0

    @property
    def name(self) -> str:
        return " ".join(map(str, self))


CASES: list[Case] = [
    *(Case(samples, readers) for samples in (1, 3, 13, 16) for readers in ("every_rank", "node", "rank0")),
    Case(13, workers=2),
    Case(13, eval_iter=1),
]


class Sentences:
    """Token sequences with what comes next; some tokens do not count."""

    def __init__(self, samples: int) -> None:
        rng = np.random.default_rng(5)
        self.tokens = rng.integers(0, VOCABULARY, (samples, LENGTH + 1))
        self.tokens[:, 0] = np.arange(samples) % VOCABULARY
        self.tokens[:, 1] = np.arange(samples) // VOCABULARY
        self.labels = np.where(rng.random((samples, LENGTH)) < 0.3, -1, self.tokens[:, 1:])
        self.kinds = rng.integers(0, VOCABULARY, samples)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Instance:
        fields: dict[str, Any] = {
            "input_ids": DistTensorData(self.tokens[index, :LENGTH]),
            "labels": DistTensorData(self.labels[index], placement_idx=-1),
            "kinds": DistTensorData(self.kinds[index], placement_idx=-1),
        }
        return Instance(**fields)
