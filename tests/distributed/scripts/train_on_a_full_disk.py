"""Trains with a checkpoint every second step, and keeps them all.

    train_on_a_full_disk.py FOLDER HIDDEN [STEP]

After that step not one byte more can be written to the disk.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from libai_data.engine import DefaultTrainer, HookBase, default_setup
from libai_data.engine.failure import end_job_on_failure
from libai_data.engine.setup import seed_all
from libai_data.mesh.current import get_rank
from tests.engine.tiny import tiny_config
from tests.full_disk import fill


class FillUp(HookBase):
    """Takes what room there is."""

    def after_step(self) -> None:
        if len(sys.argv) > 3 and self.trainer.iter == int(sys.argv[3]) and get_rank() == 0:
            fill(Path(sys.argv[1]))


def main() -> None:
    """Train to the end, where the last checkpoint must be written."""
    with end_job_on_failure(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])):
        cfg = tiny_config(sys.argv[1], train_iter=12)
        cfg.model.hidden = int(sys.argv[2])
        cfg.train.checkpointer.period = 2
        cfg.train.checkpointer.max_to_keep = None
        cfg.train.evaluation.enabled = False
        default_setup(cfg)
        seed_all(cfg.train.seed)
        trainer = DefaultTrainer(cfg)
        trainer.register_hooks([FillUp()])
        print(f"RANK {get_rank()} BEGINS AT {trainer.start_iter}", flush=True)
        trainer.train()


main()
