"""A training that no longer gets better ends, also after a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from libai_data.engine import HookBase, hooks
from libai_data.engine.checkpoint import Checkpointer
from libai_data.errors import ConfigError
from tests.engine.data_runs import config_of, metric, train
from tests.engine.test_train_loop import CountingTrainer


@pytest.mark.parametrize(
    ("values", "arguments", "steps", "best"),
    [
        ([1, 2, 3, 4, 5], {"patience": 1}, 10, 4),
        ([3, 2, 4, 1, 1], {"patience": 2}, 10, 4),
        ([3, 2, 1, 4, 1], {"patience": 2}, 6, 3),
        ([3, 2, 4, 1, 1], {"patience": 1}, 4, 3),
        ([3, 2, 4, 1, 1], {"patience": 1, "mode": "min"}, 6, 2),
        ([1, 1.1, 1.2, 3, 3], {"patience": 2, "min_delta": 0.5}, 6, 1),
        ([1, 1.1, 1.6, 3, 3], {"patience": 2, "min_delta": 0.5}, 10, 3),
        ([math.nan, math.inf, 1, 1, 1], {"patience": 2}, 4, None),
    ],
)
def test_the_training_ends_after_so_many_evaluations_without_an_improvement(
    values: list[float], arguments: dict[str, Any], steps: int, best: Any
) -> None:
    calls: list[str] = []
    trainer = CountingTrainer(calls)
    evaluated = iter(values)
    stopping = hooks.EarlyStopping(2, "loss", **arguments)
    trainer.register_hooks([hooks.EvalHook(2, lambda: {"loss": next(evaluated)}), stopping])
    trainer.train(0, 10)
    assert calls == [f"step {step}" for step in range(steps)]
    assert trainer.iter == trainer.max_iter == steps
    assert stopping.best == best
    # What was evaluated after the last step is not evaluated again.
    assert len(list(evaluated)) == 5 - steps // 2


def test_a_metric_that_the_evaluation_has_not_is_refused_with_the_nearest() -> None:
    trainer = CountingTrainer([])
    trainer.register_hooks([hooks.EvalHook(2, lambda: {"Acc@1": 1.0}), hooks.EarlyStopping(2, "Acc@l")])
    with pytest.raises(ConfigError, match=r"train\.early_stopping\.metric is 'Acc@l'.*Did you mean 'Acc@1'"):
        trainer.train(0, 10)


def test_the_loss_of_the_training_is_not_proposed_as_a_metric() -> None:
    class Puts(HookBase):
        def after_step(self) -> None:
            self.trainer.storage.put_scalar("total_loss", 1.0)

    trainer = CountingTrainer([])
    trainer.register_hooks([Puts(), hooks.EvalHook(2, lambda: {"Acc@1": 1.0}), hooks.EarlyStopping(2, "loss")])
    with pytest.raises(ConfigError, match=r"no such result; there are \['Acc@1'\]\.$"):
        trainer.train(0, 10)


def test_a_result_of_an_earlier_evaluation_does_not_count_again() -> None:
    trainer, evaluated = CountingTrainer([]), iter([{"loss": 1.0}, {"other": 1.0}])
    trainer.register_hooks([hooks.EvalHook(2, lambda: next(evaluated)), hooks.EarlyStopping(2, "loss", patience=1)])
    with pytest.raises(ConfigError, match=r"metric is 'val_loss', but the evaluation has no such result; .*'other'"):
        trainer.train(0, 10)


def config(folder: Path, patience: int = 2) -> Any:
    """A training that learns nothing: evaluations after 2, 4, 6, ... steps have the same result."""
    cfg = config_of(folder, early_stopping={"patience": patience}, log_period=5)
    cfg.optim.lr = 1e-12
    cfg.train.evaluation.enabled = True
    cfg.train.evaluation.eval_period = 2
    cfg.dataloader.test[0].dataset.seed = 0
    return cfg


@pytest.mark.parametrize("cut", [None, 1, 3, 4])
def test_a_training_that_is_interrupted_ends_as_early(cut: Any, tmp_path: Path) -> None:
    if cut is not None:
        train(config(tmp_path), stop_after=cut)
    trainer = train(config(tmp_path), resume=cut is not None)
    assert trainer.iter == 6
    # Losses that no logging step has read are written too.
    assert list(metric(tmp_path, "total_loss"))[-1] == 5
    folder = Checkpointer(trainer.model, str(tmp_path))
    assert Path(folder.checkpoint_to_resume()).name == "model_final"
    assert folder.peek(folder.checkpoint_to_resume())["iteration"] == 5
    assert "The training ends early: Acc@1 has not improved for 2 evaluations" in (tmp_path / "log.txt").read_text()


def test_a_run_that_ended_early_goes_on_only_with_more_patience(tmp_path: Path) -> None:
    train(config(tmp_path))
    assert train(config(tmp_path), resume=True).steps == {}
    assert "The run has ended early" in (tmp_path / "log.txt").read_text()
    assert list(train(config(tmp_path, patience=3), resume=True).steps) == [6, 7]


def test_early_stopping_without_evaluations_is_refused(tmp_path: Path) -> None:
    for key in ("enabled", "eval_period"):
        cfg = config(tmp_path)
        cfg.train.evaluation[key] = False if key == "enabled" else 0
        with pytest.raises(ConfigError, match=r"train\.early_stopping\.patience is 2, but the training has no eval"):
            train(cfg)
