"""Trains on all ranks, from the last checkpoint of the same LIBAI_DATA_JOB on, and notes which samples each step takes.

    interrupted_training.py STEPS CHECKPOINT_PERIOD FOLDER=DROPOUT ...

See `NotingTrainer` for the notes.
"""

from __future__ import annotations

import sys

import oneflow as flow

from libai_data.engine import default_setup
from libai_data.engine.setup import seed_all
from tests.distributed.noting import NotingTrainer
from tests.engine.tiny import tiny_config


def main() -> None:
    """Train each folder's training to its end."""
    for argument in sys.argv[3:]:
        folder, dropout = argument.rsplit("=", 1)
        cfg = tiny_config(folder, train_iter=int(sys.argv[1]))
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
