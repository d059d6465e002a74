"""Trains on 4 ranks: whole, stopped and resumed, from another mesh's checkpoint.

    train_and_resume.py FOLDER TENSOR PIPELINE some|all

What each training leaves lies in FOLDER/<its name>; test_training_on_ranks.py looks at it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any

from libai_data.engine import DefaultTrainer, default_setup
from libai_data.engine.checkpoint.directory import CheckedFile
from libai_data.errors import CheckpointError
from libai_data.mesh.current import get_rank, synchronize
from tests.engine.data_runs import Stop, Stopped
from tests.engine.tiny import tiny_config
from tests.engine.tiny_images import image_config

FOLDER, TENSOR, PIPELINE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ALL = sys.argv[4] == "all"


def train(cfg: Any, resume: bool = False, stop_after: int | None = None) -> Any:
    """One training; `stop_after` ends it after that step."""
    cfg.train.resume = resume
    default_setup(cfg)
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([Stop(stop_after)])
    with contextlib.suppress(Stopped):
        trainer.train()
    synchronize()
    return trainer.start_iter


def config(name: str, **options: Any) -> Any:
    """The transformer on this launch's mesh, with a block for each stage."""
    return image_config(f"{FOLDER}/{name}", PIPELINE, TENSOR, PIPELINE, **options)


def full_disk(name: str) -> None:
    """Rank 0 cannot write; every rank must hear of it, and none must hang."""
    trainer = DefaultTrainer(config(name))
    before, written = CheckedFile.write, []

    def write(self: CheckedFile, data: Any) -> None:
        written.append(len(data))
        if len(written) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        before(self, data)

    CheckedFile.write = write  # type: ignore[method-assign]
    try:
        trainer.checkpointer.save("full")
    except CheckpointError as error:
        print(f"RANK {get_rank()} HEARD: {error}")
    finally:
        CheckedFile.write = before  # type: ignore[method-assign]


def main() -> None:
    train(config("whole"))
    train(config("cut"), stop_after=7)
    resumed = train(config("cut"), resume=True)
    print(f"RANK {get_rank()} RESUMED AT {resumed}")
    train(config("from_one_rank"), resume=True)
    if ALL:
        train(config("accumulated", num_accumulation_steps=2))
    full_disk("full_disk")
    if ALL and PIPELINE == 1:
        for name, stop_after, resume in (("whole", None, False), ("cut", 7, False), ("cut", None, True)):
            cfg = tiny_config(f"{FOLDER}/graph_{name}", graph=True)
            cfg.train.dist.update(tensor_parallel_size=TENSOR)
            train(cfg, stop_after=stop_after, resume=resume)


main()
