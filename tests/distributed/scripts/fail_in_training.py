"""Trains through the command, and fails on rank 1 in step 3: `fail_in_training.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from libai_data.engine import DefaultTrainer
from libai_data.engine.command import main
from libai_data.mesh import get_rank

CONFIG = Path(__file__).resolve().parents[2] / "engine" / "tiny_config.py"


class Failing(DefaultTrainer):
    """Fails on one rank."""

    def run_step(self) -> None:
        if get_rank() == 1 and self.iter == 3:
            raise RuntimeError(f"rank {get_rank()} fails in step {self.iter}")
        super().run_step()


main(["--config-file", str(CONFIG), f"train.output_dir={sys.argv[1]}"], Failing)
