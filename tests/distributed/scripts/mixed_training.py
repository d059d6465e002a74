"""Trains on a blend, filtered and packed, and on one whose weights change at a step: `mixed_training.py FOLDER ...`.

From the last checkpoint of each FOLDER/packed and FOLDER/blended on, if there is one; noting the samples of each step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import oneflow as flow

from libai_data import build_nlp_train_loader
from libai_data.config import LazyCall
from libai_data.engine import default_setup
from libai_data.engine.setup import seed_all
from tests.distributed.mixed_data import BATCH_SIZES, STEPS, blended, packed
from tests.distributed.noting import NotingTrainer
from tests.engine.tiny import TinyModel, tiny_config


class OfSequences(TinyModel):
    """Takes a packed sequence for one point, and its last label for the label."""

    def forward(
        self, points: Any, labels: Any | None = None, segment_ids: Any = None, position_ids: Any = None
    ) -> dict[str, Any]:
        if segment_ids is None or labels is None:
            return super().forward(points, labels)
        return super().forward(points + segment_ids + position_ids, labels[:, -1])


def train(name: str, dataset: Any, model: Any, folder: str) -> None:
    """Train to the end."""
    cfg = tiny_config(str(Path(folder) / name), train_iter=STEPS)
    cfg.dataloader.train = LazyCall(build_nlp_train_loader)(dataset=LazyCall(dataset)(), num_workers=1)
    cfg.model = LazyCall(model)()
    cfg.train.dist.update(tensor_parallel_size=2)
    cfg.train.checkpointer.period = 4
    cfg.train.evaluation.enabled = False
    cfg.train.batch_size_schedule = [list(entry) for entry in BATCH_SIZES]
    cfg.train.global_batch_size = None
    default_setup(cfg)
    seed_all(cfg.train.seed)
    NotingTrainer(cfg).train()
    flow._oneflow_internal.eager.Sync()


for argument in sys.argv[1:]:
    train("packed", packed, OfSequences, argument)
    train("blended", blended, TinyModel, argument)
