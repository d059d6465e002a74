"""Trains a model that calls the function `dropout`: `dropout_on_ranks.py FOLDER`.

Each rank notes a digest of its weights. The tensor axis has 2 ranks; in a run before, which is resumed, the data axis
has them.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import oneflow as flow

from libai_data.config import LazyCall
from libai_data.engine import DefaultTrainer, default_setup
from libai_data.engine.setup import seed_all
from libai_data.mesh.current import get_rank, set_mesh, synchronize
from tests.engine.tiny import TinyModel, tiny_config

FOLDER = Path(sys.argv[1])


class Model(TinyModel):
    def forward(self, points: Any, labels: Any = None) -> Any:
        return super().forward(flow.nn.functional.dropout(points, p=0.5), labels)


def train(steps: int, tensor: int, resume: bool = False) -> None:
    cfg = tiny_config(str(FOLDER / "run"), train_iter=steps, resume=resume)
    cfg.train.dist.tensor_parallel_size = tensor
    cfg.train.evaluation.enabled = False
    cfg.model = LazyCall(Model)()
    default_setup(cfg)
    seed_all(cfg.train.seed)
    trainer = DefaultTrainer(cfg)
    trainer.train()
    digest = zlib.crc32(b"".join(each.to_local().numpy().tobytes() for each in trainer.model.parameters()))
    (FOLDER / f"{resume}-{tensor}-{get_rank()}").write_text(str(digest))
    synchronize()
    set_mesh(None)


train(2, tensor=2)
train(2, tensor=1)
train(4, tensor=2, resume=True)
