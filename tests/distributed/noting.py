"""Notes, for the tests of interrupted trainings, which samples each step of a training takes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from libai_data.engine import DefaultTrainer, HookBase
from libai_data.mesh.current import get_rank
from tests.engine.data_runs import INDEX_OF

taken: list[str] = []


class NotingTrainer(DefaultTrainer):
    """Notes the samples of each batch that it takes; `jobs.runs_of` reads the notes.

    Rank R appends a line "STEP LOSS INDEX ..." to OUTPUT/taken-R as it ends a step, and "run" as it begins to train.
    Each step rests for LIBAI_DATA_RESTS seconds.
    """

    def build_hooks(self) -> list[HookBase | None]:
        # First, so that every rank has noted a step before it takes part in saving it: a resume begins after it.
        notes = Notes(Path(self.cfg.train.output_dir) / f"taken-{get_rank()}")
        return [notes, *super().build_hooks()]

    @classmethod
    def get_batch(cls, data: Any, input_placement_device: str = "cpu", mixup_func: Any = None) -> dict[str, Any]:
        # By their points: a rank that reads nothing does not know the indices of its rows.
        taken.extend(str(INDEX_OF[row.tobytes()]) for row in data.points.tensor.numpy())
        return super().get_batch(data, input_placement_device, mixup_func)


class Notes(HookBase):
    """Writes them down, a step in one piece."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def before_train(self) -> None:
        os.write(self._file, b"run\n")

    def before_step(self) -> None:
        taken.clear()
        time.sleep(float(os.environ.get("LIBAI_DATA_RESTS", "0")))

    def after_step(self) -> None:
        # Rank 0 alone reads losses.
        loss = self.trainer.storage.latest().get("total_loss", (None, None))[0]
        os.write(self._file, (" ".join([str(self.trainer.iter), repr(loss), *taken]) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)
