"""A loss that is NaN or infinite stops the training, with the step and its samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from libai_data.data.samplers import Ledger
from libai_data.engine import DefaultTrainer, default_setup
from libai_data.engine.checkpoint import Checkpointer
from libai_data.engine.hooks import PeriodicCheckpointer
from libai_data.engine.losses import LossBuffer
from libai_data.engine.train_loop import TrainerBase
from libai_data.errors import NonFiniteLossError
from tests.engine.tiny import TinyDataset, tiny_config

BAD = 17


class Poisoned(TinyDataset):
    """One sample is not a number."""

    def __init__(self, length: int = 40) -> None:
        super().__init__(length)
        self.points[BAD] = np.nan


def poisoned(folder: Path, evaluates: bool = False, **train: Any) -> DefaultTrainer:
    cfg = tiny_config(str(folder), **train)
    cfg.train.evaluation.update(enabled=evaluates, eval_period=1)
    cfg.dataloader.train.dataset._target_ = Poisoned
    default_setup(cfg)
    return DefaultTrainer(cfg)


def step_of_the_bad_sample(trainer: DefaultTrainer) -> int:
    return Ledger(trainer.train_loader.stream.state).uses_of(BAD, 12)[0].step


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"train_micro_batch_size": 2},
        {"log_period": 5},
        {"log_period": 1000, "checkpointer": {"period": 3}},
        {"graph": True},
        {"graph": True, "train_micro_batch_size": 4},
    ],
)
def test_a_nan_loss_stops_the_training_with_its_step_and_samples(tmp_path: Path, train: dict[str, Any]) -> None:
    trainer = poisoned(tmp_path, **train)
    step = step_of_the_bad_sample(trainer)
    _, indices = Ledger(trainer.train_loader.stream.state).samples_of(step)
    with pytest.raises(NonFiniteLossError) as caught:
        trainer.train()
    told = str(caught.value)
    assert told.startswith(f"step {step} has a loss that is NaN or infinite: loss = nan.")
    assert f"are {', '.join(f'0:{index}' for index in indices)}. " in told
    assert f"train.skip_steps=[[{step}, {step}]]" in told
    assert "train.stop_on_nonfinite_loss=False" in told
    period = trainer.cfg.train.log_period
    assert trainer.iter - step < min(period, trainer.cfg.train.checkpointer.period)
    # No checkpoint holds what came of it.
    kept = [int(path.name[-7:]) for path in tmp_path.glob("model_0*")]
    assert all(iteration < step for iteration in kept)


def test_no_best_checkpoint_follows_a_nan_loss(tmp_path: Path) -> None:
    """With an evaluation before the next log line and checkpoint: its accuracy is finite even so."""
    trainer = poisoned(tmp_path, evaluates=True, log_period=1000, checkpointer={"period": 1000})
    step = step_of_the_bad_sample(trainer)
    with pytest.raises(NonFiniteLossError, match=f"^step {step} "):
        trainer.train()
    best = Checkpointer(trainer.model).peek(str(tmp_path / "model_best"))
    assert trainer.iter == step > best["iteration"] >= 0


def test_a_checkpoint_hook_of_another_period_reads_the_losses_first(tmp_path: Path) -> None:
    trainer = poisoned(tmp_path, log_period=1000, checkpointer={"period": 1000})
    trainer.register_hooks([PeriodicCheckpointer(trainer.checkpointer, 1, file_prefix="own")])
    step = step_of_the_bad_sample(trainer)
    with pytest.raises(NonFiniteLossError):
        trainer.train()
    assert max(int(path.name[-7:]) for path in tmp_path.glob("own_0*")) == step - 1


def test_the_key_lets_a_training_go_on(tmp_path: Path) -> None:
    trainer = poisoned(tmp_path, stop_on_nonfinite_loss=False)
    trainer.train()
    assert trainer.iter == 12


def test_leaving_the_samples_out_lets_the_run_resume(tmp_path: Path) -> None:
    trainer = poisoned(tmp_path, checkpointer={"period": 1})
    step = step_of_the_bad_sample(trainer)
    assert step > 0
    with pytest.raises(NonFiniteLossError):
        trainer.train()
    resumed = poisoned(tmp_path, resume=True, skip_steps=[[step, step]], train_iter=step + 3)
    assert resumed.start_iter == step
    resumed.train()
    assert resumed.iter == step + 3


def test_only_losses_must_be_finite_and_any_loop_is_stopped() -> None:
    class Loop(TrainerBase):
        def run_step(self) -> None:
            values = {"loss_a": np.inf if self.iter == 2 else 1.0, "margin": np.nan}
            self.write_metrics({name: flow.tensor(value) for name, value in values.items()}, 0.0)

    trainer = Loop()
    with pytest.raises(FloatingPointError, match=r"step 2 has a loss that is NaN or infinite: loss_a = inf\. To train"):
        trainer.train(0, 5)
    assert trainer.iter == 2
    trainer = Loop()
    trainer.losses = LossBuffer(1000)
    with pytest.raises(NonFiniteLossError, match="step 2 "):
        trainer.train(0, 5)
    assert trainer.iter == 4
