"""Parts of a training that users override or configure in odd ways: each works, or is an error that names it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from omegaconf import OmegaConf

from libai_data.commands.train import evaluate, shorten
from libai_data.config import LazyCall
from libai_data.config.values import check_values
from libai_data.delivery import to_global
from libai_data.engine import DefaultTrainer, HookBase, built_parts
from libai_data.engine.built_parts import as_test_loaders, as_three_loaders, check_fit
from libai_data.engine.optim import get_default_optimizer_params
from libai_data.errors import ConfigError
from libai_data.loader.batch_loader import BatchLoader
from libai_data.mesh.current import set_mesh
from libai_data.structures import DistTensorData, Instance
from tests.engine.data_runs import metric
from tests.engine.test_datamodule_stages import TinyModule, config, with_module
from tests.engine.test_default_trainer import GuidesTrainer, built, command
from tests.engine.tiny import TinyDataset, TinyModel, tiny_config


def returning(method: str, part: Any) -> Any:
    """A trainer class in which a method returns this part."""
    return type("Odd", (DefaultTrainer,), {method: lambda *arguments, **named: part})


POINTS = np.zeros((8, 6), np.float32)
BATCH = Instance(points=DistTensorData(POINTS))
MISSING = r"None \(is a `return` missing\?\)"


@pytest.mark.parametrize(
    ("method", "part", "message"),
    [
        ("build_train_loader", None, f"returned no train loader, but {MISSING}"),
        ("build_train_loader", 5, "returned a int; return an iterable of batches"),
        ("build_train_loader", (BATCH, BATCH, BATCH), "returned a tuple of three, in which a Instance may be a batch"),
        (
            "build_train_loader",
            [[POINTS, POINTS]] * 3,
            r"three, in which a list may .* \(batches, None, None\)",
        ),
        ("build_test_loader", [BATCH], r"returned a list with a Instance; return a list of loaders"),
        ("build_test_loader", [[BATCH], None], "returned a list with None; return a list of loaders"),
        ("build_test_loader", BatchLoader, r"returned the class BatchLoader; return a list of loaders, such as"),
        ("build_model", None, f"by default the call at model in the config, returned {MISSING}; it must return the"),
        ("build_model", TinyDataset, "returned the class TinyDataset; it must return the model"),
        ("build_optimizer", None, f"call at optim in the config, returned {MISSING}; it must return an optimizer of"),
        ("build_lr_scheduler", None, f"call at train.scheduler in the config, returned {MISSING}"),
        (
            "build_lr_scheduler",
            SimpleNamespace(step=len, last_step=0, get_last_lr=len),
            "returned a SimpleNamespace; it must return an object with get_last_lr, step, last_step, state",
        ),
        ("build_graph", None, f"build_graph returned {MISSING}; it must return the graph, an oneflow.nn.Graph"),
        ("build_hooks", None, f"build_hooks returned {MISSING}; it must return a list of hooks"),
        ("build_hooks", HookBase(), "build_hooks returned a HookBase; it must return a list of hooks"),
        ("build_writers", None, f"build_writers returned {MISSING}; it must return a list of EventWriters"),
        ("build_writers", [3], "build_writers returned a list; it must return a list of EventWriters"),
    ],
)
def test_a_method_that_does_not_return_its_part_is_named(tmp_path: Path, method: str, part: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(tiny_config(str(tmp_path), graph=method == "build_graph"), kind=returning(method, part))
    if method in ("build_test_loader", "build_model"):
        cfg = tiny_config(str(tmp_path), load_weight=str(saved(tmp_path / "saved")))
        with pytest.raises(ConfigError, match=message):
            evaluate(cfg, returning(method, part), resume=False)


@pytest.mark.parametrize(
    ("method", "part", "message"),
    [
        ("test", None, f"test returned {MISSING}; it must return a dict of results"),
        ("test", [0.5], "test returned a list; it must return a dict of results"),
        ("build_evaluator", None, f"build_evaluator returned {MISSING}, but the config has train.evaluation.evaluator"),
    ],
)
def test_an_evaluation_without_results_names_the_method(tmp_path: Path, method: str, part: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(tiny_config(str(tmp_path), train_iter=1), kind=returning(method, part)).train()


@pytest.mark.parametrize("key", ["model", "optim", "train.scheduler"])
def test_a_call_of_the_config_that_returns_nothing_is_named(tmp_path: Path, key: str) -> None:
    cfg = tiny_config(str(tmp_path))
    OmegaConf.update(cfg, f"{key}._target_", nothing)
    with pytest.raises(ConfigError, match=rf"by default the call at {key} in the config, returned {MISSING}"):
        built(cfg)


def nothing(**arguments: Any) -> None:
    """Has forgotten to return what it makes."""
    locals()


class WithShape(list):
    """A loader with a shape, as a dataset of Hugging Face has."""

    shape = (3, 1)


def test_loaders_with_a_shape_are_no_batches() -> None:
    three = WithShape([BATCH]), WithShape([BATCH]), None
    assert as_three_loaders(three) == three and as_test_loaders([*three[:2]]) == [*three[:2]]


def test_a_list_of_three_batches_is_one_train_loader(tmp_path: Path) -> None:
    dataset = TinyDataset(24)
    batches = [(dataset.points[first : first + 8], dataset.labels[first : first + 8]) for first in (0, 8, 16)]

    class ThreeBatches(GuidesTrainer):
        @classmethod
        def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
            return batches

    trainer = built(tiny_config(str(tmp_path), train_iter=4, train_micro_batch_size=8), kind=ThreeBatches)
    assert trainer.train_loader is batches and len(trainer.test_loader) == 1
    trainer.train()
    assert len(metric(tmp_path)) == 4


def test_an_optimizer_or_schedule_of_another_model_is_refused(tmp_path: Path) -> None:
    class OtherModel(DefaultTrainer):
        @classmethod
        def build_optimizer(cls, cfg: Any, model: Any) -> Any:
            return super().build_optimizer(cfg, cls.build_model(cfg))

    class OtherOptimizer(DefaultTrainer):
        @classmethod
        def build_lr_scheduler(cls, cfg: Any, optimizer: Any) -> Any:
            return super().build_lr_scheduler(cfg, cls.build_optimizer(cfg, cls.build_model(cfg)))

    with pytest.raises(ConfigError, match=r"optimizer of 4 tensor\(s\) that are no parameters of the model"):
        built(tiny_config(str(tmp_path)), kind=OtherModel)
    with pytest.raises(ConfigError, match="build_lr_scheduler returned a schedule of another optimizer"):
        built(tiny_config(str(tmp_path)), kind=OtherOptimizer)


@pytest.mark.parametrize("kept", [1, flow.zeros(1), "text", None])
def test_a_state_of_an_optimizer_that_no_checkpoint_can_store_ends_the_first_step(tmp_path: Path, kept: Any) -> None:
    class Keeps(flow.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0].parameters:
                self._state.setdefault(parameter, {})["kept"] = kept

    cfg = tiny_config(str(tmp_path))
    cfg.optim = LazyCall(Keeps)(params=LazyCall(get_default_optimizer_params)(), lr=0.1)
    trainer = built(cfg)
    with pytest.raises(TypeError, match=r"optimizer \(Keeps\) has the state 'kept' for the parameter 'first.weight'"):
        trainer.train()
    assert trainer.iter == 0


class KeepsTensors(flow.optim.lr_scheduler.ConstantLR):
    """No checkpoint can store its rates."""

    def __init__(self, optimizer: Any) -> None:
        self.seen: list[Any] = []
        super().__init__(optimizer)

    def get_lr(self, base_lr: float, step: int) -> float:
        self.seen += [flow.tensor(base_lr)] * (step > 0)
        return base_lr


class LosesItsState(HookBase):
    """No checkpoint can store its state after the first step."""

    def after_step(self) -> None:
        self.seen = self.trainer.model

    def state_dict(self) -> dict[str, Any]:
        return vars(self).get("seen", {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_state_of_a_schedule_or_hook_that_no_checkpoint_can_store_ends_after_one_step(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path), warmup_ratio=0, checkpointer={"period": 10})
    trainer = built(cfg, LosesItsState())
    with pytest.raises(TypeError, match=r"state of the hook LosesItsState \(state is of type .*TinyModel, which"):
        trainer.train()
    assert trainer.iter == 1
    set_mesh(None)
    cfg.train.scheduler = LazyCall(KeepsTensors)()
    trainer = built(cfg)
    with pytest.raises(TypeError, match=r"KeepsTensors changes its attribute 'seen' in the training, and checkpoints"):
        trainer.train()
    assert trainer.iter == 0


def test_a_model_of_its_own_for_each_rank_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own `get_batch` gives local tensors, so nothing else would notice; rank 0 alone would be saved."""
    trainer = built(tiny_config(str(tmp_path)))
    model = TinyModel()
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    check_fit(model, optimizer, None)
    monkeypatch.setattr(built_parts, "get_world_size", lambda: 2)
    check_fit(trainer.model, trainer.optimizer, trainer.lr_scheduler)
    with pytest.raises(ConfigError, match=r"model with local parameters, such as 'first.weight': each rank"):
        check_fit(model, optimizer, None)
    model._is_ddp_module = True  # The ranks add up the gradients.
    check_fit(model, optimizer, None)


@pytest.mark.parametrize("method", ["build_model", "build_train_loader", "build_hooks"])
def test_a_method_that_ends_the_process_is_named(tmp_path: Path, method: str) -> None:
    kind = type("Ends", (DefaultTrainer,), {method: lambda *arguments: sys.exit(0)})
    with pytest.raises(ConfigError, match=rf"{method} of Ends called sys.exit\(0\); let it return, or raise an error"):
        built(tiny_config(str(tmp_path)), kind=kind)


def saved(folder: Path) -> Path:
    """The last checkpoint of a short training."""
    set_mesh(None)
    built(tiny_config(str(folder), train_iter=1)).train()
    return folder / "model_final"


def test_a_trainer_needs_no_test_loader(tmp_path: Path) -> None:
    assert built(tiny_config(str(tmp_path), train_iter=1), kind=returning("build_test_loader", None)).train() == {}


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


class BuildsAllLoaders(DefaultTrainer):
    """Makes all loaders at once, as builders that split one dataset do."""

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        train, *_ = super().build_train_loader(cfg, tokenizer)
        return train, None, *super().build_test_loader(cfg, tokenizer)

    @classmethod
    def build_test_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        return []


def test_an_evaluation_uses_the_loaders_that_are_built_with_the_train_loader(tmp_path: Path) -> None:
    results = command(tmp_path, "train.train_iter=1", kind=BuildsAllLoaders)
    assert command(tmp_path, "--eval-only", "--resume", kind=BuildsAllLoaders) == results
    with pytest.raises(ConfigError, match=r"no dataloader\.test, and build_train_loader gives no other"):
        command(tmp_path, "--eval-only", "--resume", "dataloader.test=[]")


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


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_in_the_place_of_the_output_folder_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    path.write_text("") if kind == "file" else path.symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=rf"train.output_dir {path} is a file, or a link to nothing; give the path"):
        built(tiny_config(str(path)))
