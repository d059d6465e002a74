"""Trains with a loader and a hook that have another state on each rank, and resumes: `own_states.py FOLDER`.

Each rank writes what they had at the end, and after the resume, to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oneflow as flow

from libai_data.engine import DefaultTrainer, HookBase, default_setup
from libai_data.mesh.current import get_rank, set_mesh
from libai_data.structures import DistTensorData, Instance
from tests.engine.tiny import FEATURES, tiny_config

FOLDER = Path(sys.argv[1])


class Counts:
    """Counts from another number on each rank."""

    def __init__(self, start: int) -> None:
        self.count = start

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class OwnLoader(Counts):
    def __iter__(self) -> Iterator[Instance]:
        while True:
            self.count += 1
            yield Instance(
                points=DistTensorData(flow.ones(4, FEATURES)),
                labels=DistTensorData(flow.zeros(4, dtype=flow.int64), placement_idx=-1),
            )


class OwnHook(Counts, HookBase):
    def after_step(self) -> None:
        self.count += 1


class Trainer(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        return OwnLoader(100 * get_rank())


def trainer_with(resume: bool) -> tuple[Any, list[Counts]]:
    set_mesh(None)
    cfg = tiny_config(str(FOLDER / "run"), train_iter=3, resume=resume, evaluation={"enabled": False})
    default_setup(cfg)
    trainer = Trainer(cfg)
    hooks = [OwnHook(10 * get_rank()), OwnHook(0)]
    trainer.register_hooks(hooks)
    return trainer, [trainer.train_loader, *hooks]


trainer, parts = trainer_with(resume=False)
trainer.train()
found = [[part.count for part in parts]]
_, parts = trainer_with(resume=True)
found.append([part.count for part in parts])
(FOLDER / f"{get_rank()}.json").write_text(json.dumps(found))
