"""Parts of a training that users override or configure in odd ways: each works, or is an error that names it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from libai_data.commands.train import evaluate, shorten
from libai_data.config import LazyCall
from libai_data.config.values import check_values
from libai_data.delivery import to_global
from libai_data.engine import DefaultTrainer, HookBase
from libai_data.errors import ConfigError
from libai_data.mesh.current import set_mesh
from tests.engine.data_runs import metric
from tests.engine.test_datamodule_stages import TinyModule, config, with_module
from tests.engine.test_default_trainer import built, command
from tests.engine.tiny import tiny_config


class NoTrainLoader(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        super().build_train_loader(cfg, tokenizer)


class OneTestLoader(DefaultTrainer):
    @classmethod
    def build_test_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        return super().build_test_loader(cfg, tokenizer)[0]


class ATestLoaderIsMissing(DefaultTrainer):
    @classmethod
    def build_test_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        return [*super().build_test_loader(cfg, tokenizer), None]


class NoTestLoaders(DefaultTrainer):
    @classmethod
    def build_test_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        return None


class NoHooks(DefaultTrainer):
    def build_hooks(self) -> Any:
        super().build_hooks()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoTrainLoader, r"build_train_loader returned no train loader, but None \(is a `return` missing\?\)"),
        (OneTestLoader, r"build_test_loader returned a BatchLoader; return a list of loaders, such as \[loader\]"),
        (ATestLoaderIsMissing, "build_test_loader returned a list with None; return a list of loaders"),
        (NoHooks, r"the hooks are None instead of a list \(is a `return` missing in build_hooks\?\)"),
    ],
)
def test_a_method_that_returns_no_loader_or_hook_is_named(tmp_path: Path, kind: Any, message: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=message):
        built(tiny_config(str(tmp_path)), kind=kind)
    if "test_loader" in message:
        cfg = tiny_config(str(tmp_path), load_weight=str(saved(tmp_path / "saved")))
        with pytest.raises(ConfigError, match=message):
            evaluate(cfg, kind, resume=False)


def saved(folder: Path) -> Path:
    """The last checkpoint of a short training."""
    set_mesh(None)
    built(tiny_config(str(folder), train_iter=1)).train()
    return folder / "model_final"


def test_a_trainer_needs_no_test_loader(tmp_path: Path) -> None:
    assert built(tiny_config(str(tmp_path), train_iter=1), kind=NoTestLoaders).train() == {}


class OnTheTrainer(DefaultTrainer):
    def get_batch(self, data: Any, device: str = "cpu") -> dict[str, Any]:  # type: ignore[override]
        return to_global(data)


def test_a_get_batch_that_evaluations_cannot_call_is_named(tmp_path: Path) -> None:
    trainer = built(tiny_config(str(tmp_path), train_iter=1), kind=OnTheTrainer)
    with pytest.raises(ConfigError, match=r"call OnTheTrainer.get_batch on the class; write @classmethod before it"):
        trainer.train()


@pytest.mark.parametrize("sizes", [{"global_batch_size": 16}, {"global_batch_size": 32, "num_accumulation_steps": 2}])
def test_a_loader_whose_batches_have_another_size_than_the_config_is_refused(
    tmp_path: Path, sizes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"batches have 8 rows, but .* 16.*Set train.train_micro_batch_size=8"):
        with_module(config(tmp_path, **sizes), TinyModule())


def test_a_config_has_loaders_or_a_datamodule(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path))
    cfg.datamodule = LazyCall(TinyModule)()
    with pytest.raises(ConfigError, match=r"the config has both dataloader.train and datamodule"):
        built(cfg)
    del cfg.dataloader["train"]
    with pytest.raises(ConfigError, match=r"the config has both dataloader.test and datamodule"):
        built(cfg)


def test_a_warm_up_that_the_schedule_does_not_have_is_refused(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path))
    cfg.train.scheduler = LazyCall(flow.optim.lr_scheduler.CosineDecayLR)(decay_steps=12)
    with pytest.raises(ConfigError, match=r"train.warmup_iter is 3, but .*CosineDecayLR has no argument warmup_iter"):
        built(cfg)
    set_mesh(None)
    cfg = tiny_config(str(tmp_path), warmup_ratio=0)
    cfg.train.scheduler = LazyCall(flow.optim.lr_scheduler.CosineDecayLR)(decay_steps=12)
    assert built(cfg).lr_scheduler.get_last_lr()[0] == pytest.approx(0.02)


def test_shares_of_the_steps_are_exact(tmp_path: Path) -> None:
    from libai_data.engine.scheduler import WarmupMultiStepLR

    cfg = tiny_config(str(tmp_path), train_iter=100, warmup_ratio=0.07)
    cfg.train.scheduler = LazyCall(WarmupMultiStepLR)(warmup_factor=0.1, milestones=[0.29, 0.57, 0.995])
    built(cfg)
    assert cfg.train.warmup_iter == 7  # 0.07 * 100 is 7.000000000000001
    assert cfg.train.scheduler.milestones == [29, 57, 99]  # 0.29 * 100 is 28.999999999999996


class ChangesFolder(HookBase):
    """Leaves the working directory, as some scripts do that unpack data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def before_train(self) -> None:
        os.chdir(self.folder)


def test_a_run_stays_in_its_folder_if_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    built(tiny_config("run", train_iter=2), ChangesFolder(tmp_path / "elsewhere")).train()
    assert {"model_final", "metrics.json", "last_checkpoint", "config.yaml"} <= {*os.listdir(tmp_path / "run")}
    assert os.listdir(tmp_path / "elsewhere") == []


def test_an_evaluation_without_a_metric_is_warned_of(tmp_path: Path) -> None:
    weights = saved(tmp_path / "saved")
    arguments = ["--eval-only", f"train.load_weight={weights}", "train.evaluation.evaluator=null"]
    assert command(tmp_path / "run", *arguments) == {}
    log = (tmp_path / "run" / "log_eval.txt").read_text()
    assert "The evaluation on TinyDataset has no result: train.evaluation.evaluator is None, or its evaluate()" in log


def test_a_config_that_resumes_is_evaluated_at_its_last_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path)
    assert "Acc@1" in command(tmp_path, "--eval-only", "+train.resume=true")


@pytest.mark.parametrize("keys", [{"warmup_iter": 1000}, {"scheduler": {"warmup_iter": 1000}}])
def test_a_trial_of_a_training_with_a_long_warm_up_and_evaluation_is_short(tmp_path: Path, keys: Any) -> None:
    cfg = tiny_config(str(tmp_path), train_iter=10_000, warmup_ratio=0, **keys)
    check_values(cfg)
    shorten(cfg)
    trainer = built(cfg)
    assert (trainer.max_iter, cfg.train.scheduler.warmup_iter, cfg.train.evaluation.eval_iter) == (20, 20, 20)


class CountsLabels(HookBase):
    """Has a state whose keys are ints, and a tuple and an array in it."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {}

    def after_step(self) -> None:
        self.state = {0: self.trainer.iter, (1, 2): np.arange(3)}

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def test_the_state_of_a_hook_is_restored_with_its_types(tmp_path: Path) -> None:
    built(tiny_config(str(tmp_path), train_iter=3), CountsLabels()).train()
    set_mesh(None)
    resumed = CountsLabels()
    trainer = built(tiny_config(str(tmp_path), train_iter=4, resume=True), resumed)
    assert [*resumed.state] == [0, (1, 2)] and resumed.state[0] == 2
    assert resumed.state[1, 2].tolist() == [0, 1, 2]
    # Checkpoints of earlier versions have the state itself.
    trainer._saved_states["hook CountsLabels_2"] = {"0": 5}
    old = CountsLabels()
    trainer.register_hooks([old])
    assert old.state == {"0": 5}


class ReadsTheTrainLoader(HookBase):
    def before_train(self) -> None:
        next(iter(self.trainer.train_loader))


@pytest.mark.parametrize("hooks", [[], [ReadsTheTrainLoader()]])
def test_a_hook_that_reads_batches_of_the_training_is_warned_of(tmp_path: Path, hooks: list[HookBase]) -> None:
    built(tiny_config(str(tmp_path), train_iter=2), *hooks).train()
    warning = "Before step 1, the train loader is at sample 16 instead of 8: other code, such as a hook, has read its"
    assert (tmp_path / "log.txt").read_text().count(warning) == len(hooks)


def test_a_training_in_two_parts_is_that_in_one(tmp_path: Path) -> None:
    whole = built(tiny_config(str(tmp_path / "whole"), train_iter=6))
    whole.train()
    set_mesh(None)
    parts = built(tiny_config(str(tmp_path / "parts"), train_iter=6))
    parts.train(0, 4)
    parts.train(4, 6)
    assert metric(tmp_path / "parts") == metric(tmp_path / "whole")
    assert "has read its" not in (tmp_path / "parts" / "log.txt").read_text()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_in_the_place_of_the_output_folder_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    path.write_text("") if kind == "file" else path.symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=rf"train.output_dir {path} is a file, or a link to nothing; give the path"):
        built(tiny_config(str(path)))
