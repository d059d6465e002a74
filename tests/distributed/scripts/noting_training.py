"""The training command, with a trainer that notes which samples each step takes.

    noting_training.py --config-file FILE ...

Of the environment it takes LIBAI_DATA_READERS, read modes with which to train one after the other, each into a folder
of its own ("rank0:2" takes 2 steps, and "pause" waits for a file "go" beside FILE), and LIBAI_DATA_RESTS, seconds by
which each step takes longer, so that something can happen meanwhile.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from libai_data.commands.train import run
from libai_data.config import default_argument_parser
from libai_data.engine import DefaultTrainer
from libai_data.engine.failure import end_job_on_failure
from libai_data.mesh.peers.liveness import say_farewell
from tests.distributed.noting import NotingTrainer, taken
from tests.engine.tiny import TinyDataset

INDICES = {point.tobytes(): index for index, point in enumerate(TinyDataset(40).points)}


class RowsTrainer(NotingTrainer):
    """Knows samples by their points, also on ranks that did not read them."""

    @classmethod
    def get_batch(cls, data: Any, input_placement_device: str = "cpu", mixup_func: Any = None) -> dict[str, Any]:
        rows = np.ascontiguousarray(data.get("points").tensor.numpy())
        taken.extend(str(INDICES[row.tobytes()]) for row in rows)
        return DefaultTrainer.get_batch(data, input_placement_device, mixup_func)


def train_in(readers: str, args: Any, folder: str) -> dict[str, Any]:
    """Train with a read mode, into a folder of its own."""
    mode, _, steps = readers.partition(":")
    opts = [f"dataloader.train.readers={mode}", f"train.output_dir={folder}"]
    opts += [f"train.train_iter={steps}"] if steps else []
    return run(type(args)(**{**vars(args), "opts": [*args.opts, *opts]}), RowsTrainer)


def main() -> None:
    """Train."""
    args = default_argument_parser().parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with end_job_on_failure(rank, world_size):
        if "LIBAI_DATA_READERS" not in os.environ:
            run(args, RowsTrainer)
        for number, readers in enumerate(os.environ.get("LIBAI_DATA_READERS", "").split()):
            folder = os.path.dirname(args.config_file)
            if readers == "pause":
                while not os.path.exists(f"{folder}/go"):
                    time.sleep(0.01)
            else:
                train_in(readers, args, f"{folder}/{number}")
        say_farewell()


if __name__ == "__main__":
    main()
