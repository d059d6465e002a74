"""Trains on all ranks, from the last checkpoint on if there is one, and notes which samples each step takes.

    interrupted_training.py STEPS CHECKPOINT_PERIOD FOLDER=DROPOUT ...

Rank R appends a line "STEP LOSS EPOCH:INDEX ..." to FOLDER/taken-R as it ends a step, and "run" as it begins to train.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import oneflow as flow

from libai_data.engine import DefaultTrainer, HookBase, default_setup
from libai_data.engine.setup import seed_all
from libai_data.mesh import get_rank
from tests.engine.tiny import tiny_config

taken: List[str] = []


class NotingTrainer(DefaultTrainer):
    """Notes the samples of each batch that it takes."""

    def build_hooks(self) -> List[Optional[HookBase]]:
        # First, so that every rank has noted a step before it takes part in saving it: a resume begins after it.
        notes = Notes(Path(self.cfg.train.output_dir) / f"taken-{get_rank()}")
        return [notes, *super().build_hooks()]

    @classmethod
    def get_batch(cls, data: Any, input_placement_device: str = "cpu", mixup_func: Any = None) -> Dict[str, Any]:
        rows = data._rows
        taken.extend(f"{epoch}:{index}" for epoch, index in zip(rows.epochs.tolist(), rows.indices.tolist()))
        return super().get_batch(data, input_placement_device, mixup_func)


class Notes(HookBase):
    """Writes them down, a step in one piece."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def before_train(self) -> None:
        os.write(self._file, b"run\n")

    def before_step(self) -> None:
        taken.clear()

    def after_step(self) -> None:
        # Rank 0 alone reads losses.
        loss = self.trainer.storage.latest().get("total_loss", (None, None))[0]
        os.write(self._file, (" ".join([str(self.trainer.iter), repr(loss), *taken]) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def main() -> None:
    """Train each folder's training to its end."""
    for argument in sys.argv[3:]:
        folder, dropout = argument.rsplit("=", 1)
        cfg = tiny_config(folder, train_iter=int(sys.argv[1]), resume=True)
        cfg.model.dropout = float(dropout)
        cfg.train.dist.update(tensor_parallel_size=2)
        cfg.train.checkpointer.period = int(sys.argv[2])
        cfg.train.checkpointer.max_to_keep = 2
        cfg.train.evaluation.enabled = False
        default_setup(cfg)
        seed_all(cfg.train.seed)
        NotingTrainer(cfg).train()
        flow._oneflow_internal.eager.Sync()


main()
