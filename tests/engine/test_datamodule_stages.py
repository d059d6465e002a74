"""The trainer with a data module: fit, validate, test, predict; with Lightning's own as well."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from omegaconf import OmegaConf

from libai_data import DataLoader
from libai_data.commands.train import evaluate
from libai_data.config import LazyCall
from libai_data.delivery.build import build_image_test_loader, build_image_train_loader
from libai_data.engine import DefaultTrainer, default_setup
from libai_data.engine.datamodule.datamodule import DataModule
from libai_data.engine.evaluation import MeanLossEvaluator
from libai_data.errors import ConfigError
from libai_data.iterables import from_iterable
from libai_data.mesh.current import set_mesh
from tests.engine.data_runs import metric
from tests.engine.test_default_trainer import trained
from tests.engine.tiny import TinyDataset, TinyModel, assert_equal_weights, tiny_config, weights


class TinyModule(DataModule):
    """The data of `tiny_config`, from loaders of this package."""

    def __init__(self, length: int = 40) -> None:
        self.save_hyperparameters()
        self.calls: list[Any] = []
        self.batches = 0

    def setup(self, stage: str) -> None:
        self.calls.append(stage)

    def teardown(self, stage: str) -> None:
        self.calls.append(f"end of {stage}")

    def train_dataloader(self) -> Any:
        return build_image_train_loader(TinyDataset(self.hparams.length), 8, num_workers=0, seed=1234)

    def val_dataloader(self) -> Any:
        return build_image_test_loader(TinyDataset(21, seed=1), 4, num_workers=0)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.batches += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def config(folder: Path, **train: Any) -> Any:
    """`tiny_config` without its loaders."""
    cfg = tiny_config(str(folder), **train)
    del cfg["dataloader"]
    return cfg


def with_module(cfg: Any, module: Any, resume: bool = False, stop_after: int | None = None) -> Any:
    return trained(cfg, lambda cfg: DefaultTrainer(cfg, datamodule=module), resume, stop_after)


def test_a_training_with_a_module_is_that_with_the_same_loaders(tmp_path: Path) -> None:
    plain = tiny_config(str(tmp_path / "plain"))
    plain.train.seed = 1234
    whole = trained(plain)
    module = TinyModule()
    trainer = with_module(config(tmp_path / "module"), module)
    assert metric(tmp_path / "module") == metric(tmp_path / "plain")
    assert metric(tmp_path / "module", "Acc@1") == metric(tmp_path / "plain", "Acc@1")
    assert_equal_weights(trainer.model, weights(whole.model))
    assert module.calls == ["fit", "end of fit"]


def test_a_training_in_parts_has_its_module_until_the_end(tmp_path: Path) -> None:
    metrics = []
    for parts in ([4], [1, 3, 4]):
        cfg, module = config(tmp_path / f"{len(parts)}", train_iter=4), TinyModule()
        default_setup(cfg)
        trainer = DefaultTrainer(cfg, datamodule=module)
        for end in parts:
            trainer.train(max_iter=end)
            assert module.calls == ["fit", *["end of fit"] * (end == 4)]
        metrics.append(metric(tmp_path / f"{len(parts)}"))
        set_mesh(None)
    assert metrics[0] == metrics[1]


class EvaluatedByNode(TinyModule):
    def val_dataloader(self) -> Any:
        return DataLoader(TinyDataset(21, seed=1), 4, ends="pad", readers="node")


def test_an_evaluation_between_the_parts_of_a_training_leaves_its_loaders_open(tmp_path: Path) -> None:
    cfg, module = config(tmp_path, train_iter=4, evaluation={"eval_period": 1}), EvaluatedByNode()
    default_setup(cfg)
    trainer = DefaultTrainer(cfg, datamodule=module)
    trainer.train(max_iter=2)
    between = trainer.evaluate("validate")["Acc@1"]
    trainer.train(max_iter=4)
    after = trainer.evaluate("validate")["Acc@1"]
    found = metric(tmp_path, "Acc@1")
    assert (found[1], found[3], sorted(found)) == (between, after, [0, 1, 2, 3])


def test_a_module_of_the_config_trains_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    for name, stop_after in (("whole", None), ("cut", 7)):
        cfg = config(tmp_path / name)
        cfg.datamodule = LazyCall(TinyModule)(length=40)
        trained(cfg, stop_after=stop_after)
        set_mesh(None)
    resumed = trained(cfg, resume=True)
    assert resumed.start_iter == 5
    assert metric(tmp_path / "cut") == metric(tmp_path / "whole")
    # 12 steps, and 6 batches of each of the two evaluations after the checkpoint.
    assert resumed.data.datamodule.batches == 12 + 2 * 6
    assert resumed.checkpointer.stateful["datamodule"].may_differ  # Each rank restores its own.


def test_it_validates_tests_and_predicts(tmp_path: Path) -> None:
    module = TinyModule()
    trainer = with_module(config(tmp_path, train_iter=5), module)
    results = trainer.evaluate("validate")
    assert trainer.evaluate("test") == results
    assert results["Acc@1"] == metric(tmp_path, "Acc@1")[4]
    scores = trainer.predict()["prediction_scores"]
    assert scores.shape == (21, 3)
    assert module.calls[2:] == [
        each for stage in ("validate", "test", "predict") for each in (stage, f"end of {stage}")
    ]
    with pytest.raises(ConfigError, match="stage is 'fit'; it must be 'validate' or 'test'"):
        trainer.evaluate("fit")
    cfg = config(tmp_path)
    cfg.datamodule = LazyCall(TinyModule)()
    cfg.train.load_weight = str(tmp_path / "model_final")
    assert evaluate(cfg, DefaultTrainer, resume=False) == results


class CountsSteps(TinyModel):
    """Has scores that depend on the number of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, points: Any, labels: Any = None) -> dict[str, Any]:
        self.steps += self.training
        outputs = super().forward(points, labels)
        return {name: value * self.steps for name, value in outputs.items()}


class CountsTrainingBatches(TinyModule):
    """Shifts all points by the number of batches of the training so far."""

    stages: ClassVar[set[tuple[bool, ...]]] = set()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.stages.add((self.trainer.training, self.trainer.validating, self.trainer.testing))
        self.batches += self.trainer.training
        batch.points.tensor = batch.points.tensor + self.batches
        return batch


@pytest.mark.parametrize("resume", [True, False])
def test_an_evaluation_of_a_checkpoint_has_what_the_training_changed_in_module_and_model(
    tmp_path: Path, resume: bool
) -> None:
    cfg = config(tmp_path, train_iter=5)
    cfg.model, cfg.train.evaluation.evaluator = LazyCall(CountsSteps)(), LazyCall(MeanLossEvaluator)()
    trainer = with_module(cfg, CountsTrainingBatches())
    expected = trainer.evaluate("test")
    assert expected == {"loss": metric(tmp_path, "val_loss")[4]}
    CountsTrainingBatches.stages.clear()
    cfg.datamodule = LazyCall(CountsTrainingBatches)()
    cfg.train.load_weight = "" if resume else str(tmp_path / "model_final")
    assert evaluate(cfg, DefaultTrainer, resume) == expected
    assert CountsTrainingBatches.stages == {(False, False, True)}


def lightning_module() -> Any:
    """A LightningDataModule as its users write it."""
    pl = pytest.importorskip("pytorch_lightning")
    import torch
    from torch.utils.data import DataLoader, TensorDataset, random_split

    class Points(pl.LightningDataModule):  # type: ignore[name-defined]
        def __init__(self, batch_size: int = 5) -> None:
            super().__init__()
            self.save_hyperparameters()

        def setup(self, stage: str) -> None:
            data = TinyDataset(60)
            tensors = TensorDataset(torch.from_numpy(data.points), torch.from_numpy(data.labels))
            self.parts = random_split(tensors, [40, 20], generator=torch.Generator().manual_seed(0))

        def train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(1)
            return DataLoader(self.parts[0], self.hparams.batch_size, shuffle=True, generator=generator)

        def val_dataloader(self) -> Any:
            return [DataLoader(self.parts[1], 6), DataLoader(self.parts[1], 3)]

        def predict_dataloader(self) -> Any:
            return DataLoader(self.parts[1], 7)

    return Points()


def test_a_lightning_module_runs_unchanged_and_resumes(tmp_path: Path) -> None:
    whole = with_module(config(tmp_path / "whole"), lightning_module())
    assert set(whole._last_eval_results) == {"TensorDataset", "TensorDataset_2"}
    one, other = whole._last_eval_results.values()
    assert one == other
    assert whole.predict()["prediction_scores"].shape == (20, 3)
    cfg = config(tmp_path / "cut")
    OmegaConf.update(cfg, "train.evaluation.enabled", False)
    with_module(cfg, lightning_module(), stop_after=7)
    resumed = with_module(cfg, lightning_module(), resume=True)
    assert resumed.start_iter == 5
    assert metric(tmp_path / "cut") == metric(tmp_path / "whole")


def test_a_lightning_module_of_datasets_has_the_loaders_it_was_given() -> None:
    pl = pytest.importorskip("pytorch_lightning")
    import torch

    from libai_data.engine.datamodule.data_stages import DataStages

    tensors = torch.utils.data.TensorDataset(torch.arange(6))
    module = pl.LightningDataModule.from_datasets(train_dataset=tensors, batch_size=3)
    stages = DataStages(module, argument_names=["x"])
    stages.enter("fit")
    assert next(iter(stages.loaders("train")[0])).x.shape == (3,)
    assert stages.loaders("test") == []
    stages.leave("fit")


def tiny_stream(epoch: int, length: int) -> Any:
    """The samples of `TinyDataset`, in another order each round."""
    dataset = TinyDataset(length)
    return (dataset[int(index)] for index in np.random.default_rng(epoch).permutation(length))


def test_a_stream_of_the_config_trains_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    for name, stop_after in (("whole", None), ("cut", 7)):
        cfg = tiny_config(str(tmp_path / name))
        cfg.dataloader.train = LazyCall(from_iterable)(source=partial(tiny_stream, length=27), ends="cycle")
        cfg.dataloader.test = [LazyCall(from_iterable)(source=partial(tiny_stream, 0, 21), ends="pad")]
        trained(cfg, stop_after=stop_after)
        set_mesh(None)
    assert trained(cfg, resume=True).start_iter == 5
    assert metric(tmp_path / "cut") == metric(tmp_path / "whole")
    assert metric(tmp_path / "cut", "Acc@1") == metric(tmp_path / "whole", "Acc@1")
