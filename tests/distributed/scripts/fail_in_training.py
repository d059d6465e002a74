"""Trains through the command; in step 3 rank 1 fails, exits with code 0, or sets itself another end:
`fail_in_training.py FOLDER raise|exit|prolong`."""

from __future__ import annotations

import sys
from pathlib import Path

from libai_data.commands.train import main
from libai_data.engine import DefaultTrainer
from libai_data.mesh.current import get_rank

CONFIG = Path(__file__).resolve().parents[2] / "engine" / "tiny_config.py"
FOLDER, HOW = sys.argv[1:]


class Failing(DefaultTrainer):
    """Fails on one rank."""

    def run_step(self) -> None:
        if get_rank() == 1 and self.iter == 3:
            if HOW == "exit":
                sys.exit(0)
            if HOW == "raise":
                raise RuntimeError(f"rank {get_rank()} fails in step {self.iter}")
            self.max_iter = 20
        super().run_step()


main(["--config-file", str(CONFIG), f"train.output_dir={FOLDER}"], Failing)
