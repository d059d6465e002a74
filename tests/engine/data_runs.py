"""Trainings of one rank that write down which samples each step took."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, ClassVar

from libai_data.engine import DefaultTrainer, HookBase, default_setup
from libai_data.mesh.current import set_mesh
from tests.engine.tiny import TinyDataset, tiny_config

INDEX_OF: dict[bytes, int] = {row.tobytes(): index for index, row in enumerate(TinyDataset(200).points)}


class Stopped(Exception):
    """What ends a training in the middle."""


class Stop(HookBase):
    """Ends a training after a step."""

    def __init__(self, after: int | None) -> None:
        self._after = after

    def after_step(self) -> None:
        if self.trainer.iter == self._after:
            raise Stopped


class RecordingTrainer(DefaultTrainer):
    """Keeps the indices of each step's samples."""

    batches: ClassVar[list[list[int]]] = []
    steps: dict[int, list[int]]

    @classmethod
    def get_batch(cls, data: Any, input_placement_device: str = "cuda", mixup_func: Any = None) -> dict[str, Any]:
        if len(data.points.tensor):
            cls.batches.append([INDEX_OF[row.tobytes()] for row in data.points.tensor.numpy()])
        return super().get_batch(data, input_placement_device, mixup_func)

    def run_step(self) -> None:
        type(self).batches.clear()
        super().run_step()
        self.steps[self.iter] = [index for batch in self.batches for index in batch]


def config_of(folder: Path, length: int = 40, **train: Any) -> Any:
    """The tiny training without evaluation; a checkpoint every 2 steps."""
    cfg = tiny_config(str(folder), **train)
    cfg.dataloader.train.dataset.length = length
    cfg.train.evaluation.enabled = False
    if "checkpointer" not in train:
        cfg.train.checkpointer.period = 2
        cfg.train.checkpointer.max_to_keep = None
    return cfg


def train(
    cfg: Any, resume: bool = False, stop_after: int | None = None, kind: type[RecordingTrainer] = RecordingTrainer
) -> RecordingTrainer:
    """Run a training; the trainer's `steps` holds what each step took."""
    set_mesh(None)
    cfg.train.resume = resume
    default_setup(cfg)
    trainer = kind(cfg)
    trainer.steps = {}
    trainer.register_hooks([Stop(stop_after)])
    with contextlib.suppress(Stopped):
        trainer.train()
    return trainer


def metric(folder: Path, name: str = "total_loss") -> dict[int, float]:
    """Iteration -> value, of metrics.json."""
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return {line["iteration"]: line[name] for line in lines if name in line}
