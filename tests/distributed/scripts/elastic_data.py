"""One training, stopped every two steps and continued on another mesh, with other workers and another read mode.

    elastic_data.py FOLDER

Rank R writes FOLDER/R.json: step -> for each of its batches, the indices of the rank's rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import oneflow as flow

from libai_data.mesh.current import get_rank, set_mesh, synchronize
from tests.engine.data_runs import RecordingTrainer, config_of, train

RAMP = [[0, 8], [3, 16], [8, 32]]
SKIPS = [[4, 5], [9, 9]]
LENGTH = 150


class Leg(NamedTuple):
    """Two steps of the training."""

    mesh: tuple[int, int]
    readers: str
    workers: int = 0
    sizes: tuple[Any, Any] = (None, 1)
    """Micro-batch size and accumulation steps; one of them is open."""


LEGS = [
    Leg((4, 1), "every_rank"),
    Leg((2, 2), "node", workers=1),
    Leg((1, 4), "rank0", sizes=(None, 2)),
    Leg((4, 1), "node", sizes=(2, None)),
    Leg((2, 2), "rank0", workers=2, sizes=(4, None)),
    Leg((1, 4), "every_rank", sizes=(8, None)),
    Leg((2, 2), "every_rank", workers=1, sizes=(None, 4)),
]


def schedule_keys() -> dict[str, Any]:
    """What all legs, and the training on one rank, have in common."""
    return {
        "batch_size_schedule": RAMP,
        "skip_steps": SKIPS,
        "global_batch_size": None,
        "train_iter": 2 * len(LEGS),
        "checkpointer": {"period": 2, "max_to_keep": 2, "save_model_after_n_epoch": None},
    }


class Trainer(RecordingTrainer):
    """Keeps the batches of each step apart."""

    taken: ClassVar[dict[int, list[list[int]]]] = {}

    def run_step(self) -> None:
        super().run_step()
        self.taken[self.iter] = [list(batch) for batch in self.batches]


def main() -> None:
    folder = Path(sys.argv[1])
    for number, leg in enumerate(LEGS):
        micro_batch_size, accumulation = leg.sizes
        cfg = config_of(folder / "run", LENGTH, **schedule_keys())
        cfg.train.train_micro_batch_size, cfg.train.num_accumulation_steps = micro_batch_size, accumulation
        cfg.train.dist.update(data_parallel_size=leg.mesh[0], tensor_parallel_size=leg.mesh[1])
        # Others would import OneFlow with the dataset, which takes seconds.
        cfg.dataloader.train.update(readers=leg.readers, num_workers=leg.workers, start_method="fork")
        trainer = train(cfg, resume=number > 0, stop_after=2 * number + 1, kind=Trainer)
        assert trainer.start_iter == 2 * number
        trainer.train_loader.close()
        flow._oneflow_internal.eager.Sync()
        synchronize()
        set_mesh(None)
    (folder / f"{get_rank()}.json").write_text(json.dumps(Trainer.taken))
    synchronize()


if __name__ == "__main__":
    main()
