"""The example training, the digits ViT on 2 x 2 ranks: its steps, and how long they wait for data."""

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

DIGITS = "digits"
CONFIG = Path(__file__).resolve().parent.parent.parent / "configs" / "vit_digits.py"

_STEPS, _STEPS_TO_WARM_UP, _QUICK_STEPS = 80, 20, 12


@dataclass(frozen=True)
class StepTimes:
    """What came of a training.

    Args:
        seconds: of a step, the mean.
        waiting: share of them in which the trainer waited for data, 0 to 1.
    """

    seconds: float
    waiting: float


@contextmanager
def waiting_of_digits(scale: Scale) -> Iterator[Measure]:
    """Share of the steps in which the trainer waits for data, %."""
    yield lambda: 100 * _train(scale).waiting


@lru_cache(maxsize=1)
def digits_times(scale: Scale) -> StepTimes:
    """How long steps take, measured once."""
    return _train(scale)


def _train(scale: Scale) -> StepTimes:
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
    cfg: Any = LazyConfig.load(str(CONFIG))
    cfg.dataloader.train.dataset[0].root = str(scale.folder / DIGITS / "train")
    cfg.dataloader.test = None
    cfg.train.evaluation.enabled = False
    cfg.train.checkpointer.update(period=10**9, save_model_after_n_epoch=None)
    cfg.train.update(
        train_epoch=0, train_iter=steps, output_dir=broadcast_py_object(tempfile.mkdtemp(dir=scale.folder), src=0)
    )
    cfg.train.dist.update(data_parallel_size=2, tensor_parallel_size=2)
    default_setup(cfg)
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([Clock()])
    trainer.train()
    seconds = [end - start for start, end in zip(ends[uncounted - 1 : -1], ends[uncounted:])]
    return StepTimes(sum(seconds) / len(seconds), sum(waiting[uncounted:]) / sum(seconds))
