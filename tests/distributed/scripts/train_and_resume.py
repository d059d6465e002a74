"""Trains on 4 ranks: whole, stopped and resumed, from another mesh's checkpoint, with rank 0 reading for all.

    train_and_resume.py FOLDER TENSOR PIPELINE some|all

What each training leaves lies in FOLDER/<its name>; test_training_on_ranks.py looks at it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, Callable

import oneflow as flow

from libai_data.engine import DefaultTrainer, default_setup
from libai_data.engine.checkpoint.directory import CheckedFile
from libai_data.errors import CheckpointError
from libai_data.mesh.current import get_layer_placement, get_nd_sbp, get_rank, is_main_process, synchronize
from libai_data.structures import Instance
from tests.engine.data_runs import Stop, Stopped
from tests.engine.tiny import tiny_config
from tests.engine.tiny_images import TinyImages, image_config

FOLDER, TENSOR, PIPELINE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ALL = sys.argv[4] == "all"


def train(cfg: Any, kind: Any = DefaultTrainer, resume: bool = False, stop_after: int | None = None) -> Any:
    """One training; `stop_after` ends it after that step."""
    cfg.train.resume = resume
    default_setup(cfg)
    trainer = kind(cfg)
    trainer.register_hooks([Stop(stop_after)])
    with contextlib.suppress(Stopped):
        trainer.train()
    synchronize()
    return trainer.start_iter


def config(name: str, **options: Any) -> Any:
    """The transformer on this launch's mesh."""
    return image_config(f"{FOLDER}/{name}", TENSOR, PIPELINE, **options)


class Rank0Reads(DefaultTrainer):
    """LiBai's guide: rank 0 gets all data and redistributes it; the others' loader yields None."""

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        class Loader:
            dataset = TinyImages(40)

            def __iter__(self) -> Iterator[Any]:
                for first in range(0, 40, 8):
                    rows = slice(first, first + 8)
                    yield (self.dataset.images[rows], self.dataset.labels[rows]) if is_main_process() else None

        return Loader(), None, None

    @classmethod
    def get_batch(cls, data: Any, mixup_func: Callable | None = None) -> dict[str, Any]:  # type: ignore[override]
        if isinstance(data, Instance):
            return super().get_batch(data, "cpu")
        if data is None:
            images, labels = flow.empty(8, 1, 4, 4, dtype=flow.float32), flow.empty(8, dtype=flow.int64)
        else:
            images, labels = (flow.tensor(array) for array in data)
        synchronize()
        everywhere = flow.env.all_device_placement("cpu")
        rows = get_nd_sbp([flow.sbp.split(0), flow.sbp.broadcast])
        images = images.to_global(sbp=flow.sbp.broadcast, placement=everywhere)
        labels = labels.to_global(sbp=flow.sbp.broadcast, placement=everywhere)
        return {
            "images": _to(images, get_layer_placement(0), rows),
            "labels": _to(labels, get_layer_placement(-1), rows),
        }


def _to(tensor: Any, placement: Any, rows: Any) -> Any:
    local = tensor.to_local()
    own = flow.empty(tuple(tensor.shape), dtype=tensor.dtype, placement=placement, sbp=[flow.sbp.broadcast] * len(rows))
    if own.to_local().numel():
        own.to_local().copy_(local)
    return own.to_global(sbp=rows)


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
    train(config("rank0_reads"), Rank0Reads)
    full_disk("full_disk")
    if ALL and PIPELINE == 1:
        for name, stop_after, resume in (("whole", None, False), ("cut", 7, False), ("cut", None, True)):
            cfg = tiny_config(f"{FOLDER}/graph_{name}", graph=True)
            cfg.train.dist.update(tensor_parallel_size=TENSOR)
            train(cfg, stop_after=stop_after, resume=resume)
    print(f"RANK {get_rank()} DONE")


main()
