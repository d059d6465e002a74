"""The example trainings, the digits ViT and the GPT: how long their steps take, and how much of it is spent on data."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tools.benchmarks.rows import Measure, Scale

DIGITS, GPT = "digits", "gpt"
VOCABULARY = 2048
_CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"
_CONFIG = {DIGITS: _CONFIGS / "vit_digits.py", GPT: _CONFIGS / "gpt_stdlib.py"}

_STEPS, _STEPS_TO_WARM_UP, _QUICK_STEPS = 40, 10, 12


@dataclass(frozen=True)
class StepTimes:
    """What came of a training.

    Args:
        seconds: of a step, the mean.
        data: share of them that went into data: the loader, to_global and their checks; 0 to 1.
    """

    seconds: float
    data: float


@contextmanager
def share_of_data(kind: str, scale: Scale) -> Iterator[Measure]:
    """Share of a training's steps that goes into data, %, on all ranks that there are."""
    yield lambda: 100 * _train(kind, scale).data


@contextmanager
def milliseconds_a_step(kind: str, scale: Scale) -> Iterator[Measure]:
    """How long a step takes, ms."""
    yield lambda: 1e3 * _train(kind, scale).seconds


@lru_cache(maxsize=1)
def digits_times(scale: Scale) -> StepTimes:
    """How long steps take, measured once."""
    return _train(DIGITS, scale)


def _train(kind: str, scale: Scale) -> StepTimes:
    """Train for some steps as `tools/train_net.py` does; the first are not counted."""
    import oneflow as flow

    from libai_data.config import LazyConfig
    from libai_data.engine import DefaultTrainer, HookBase, default_setup
    from libai_data.mesh import broadcast_py_object

    waiting: list[float] = []
    ends: list[float] = []

    class Clock(HookBase):
        def after_step(self) -> None:
            # Its own operators run behind it, so a single step says little, and the sum of all is right.
            flow._oneflow_internal.eager.Sync()
            ends.append(time.perf_counter())
            waiting.append(self.trainer._trainer.inputs.seconds)

    steps, uncounted = (_QUICK_STEPS, 2) if scale.quick else (_STEPS, _STEPS_TO_WARM_UP)
    cfg: Any = LazyConfig.load(str(_CONFIG[kind]))
    if kind == DIGITS:
        cfg.dataloader.train.dataset[0].root = str(scale.folder / DIGITS / "train")
    else:
        cfg.dataloader.train.dataset[0].data_prefix = str(scale.folder / GPT)
    cfg.dataloader.test = None
    cfg.train.evaluation.enabled = False
    cfg.train.checkpointer.update(period=10**9, save_model_after_n_epoch=None)
    cfg.train.update(
        train_epoch=0, train_iter=steps, output_dir=broadcast_py_object(tempfile.mkdtemp(dir=scale.folder), src=0)
    )
    size = 2 if flow.env.get_world_size() == 4 else 1
    cfg.train.dist.update(data_parallel_size=size, tensor_parallel_size=size)
    default_setup(cfg)
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([Clock()])
    trainer.train()
    seconds = [end - start for start, end in zip(ends[uncounted - 1 : -1], ends[uncounted:])]
    return StepTimes(sum(seconds) / len(seconds), sum(waiting[uncounted:]) / sum(seconds))
