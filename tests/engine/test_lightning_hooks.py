"""Every hook of a LightningDataModule is called as Lightning says, and several training loaders train together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from libai_data.config import LazyCall
from libai_data.engine.datamodule.data_stages import DataStages
from libai_data.engine.datamodule.datamodule import DataModule
from libai_data.errors import CheckpointError, ConfigError
from libai_data.iterables import from_iterable
from libai_data.iterables.combined import CombinedLoader
from libai_data.structures import DistTensorData, Instance
from tests.engine.data_runs import metric
from tests.engine.test_datamodule_stages import config, with_module
from tests.engine.tiny import TinyDataset, TinyModel
from tests.properties import slowly


def lightning(form: str, calls: list[Any]) -> Any:
    """A LightningDataModule of dicts, tuples or single tensors, with all the hooks."""
    pl = pytest.importorskip("pytorch_lightning")
    import torch
    from torch.utils.data import DataLoader

    points = torch.arange(24, dtype=torch.float32).reshape(12, 2)
    rows = {
        "dict": [{"points": {"first": row}, "labels": index} for index, row in enumerate(points)],
        "tuple": [(row, index) for index, row in enumerate(points)],
        "tensor": list(points),
    }[form]

    def seen(batch: Any) -> Any:
        if form == "dict":
            assert type(batch) is dict and set(batch) == {"points", "labels"}
            return batch["points"]["first"]
        assert type(batch) in ((tuple, list) if form == "tuple" else (torch.Tensor,))
        return batch if form == "tensor" else batch[0]

    class Hooked(pl.LightningDataModule):  # type: ignore[name-defined]
        def train_dataloader(self) -> Any:
            return DataLoader(rows, 4)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append(("before", dataloader_idx, tuple(seen(batch).shape)))
            seen(batch).add_(100)
            return batch

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            calls.append(("transfer", dataloader_idx, device))
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append(("after", dataloader_idx, type(seen(batch))))
            changed = seen(batch) * 2
            if form == "dict":
                return {**batch, "points": {"first": changed}, "added": changed.sum(1)}
            return changed if form == "tensor" else (changed, *batch[1:])

    return Hooked()


@pytest.mark.parametrize("form", ["dict", "tuple", "tensor"])
def test_lightnings_hooks_get_what_its_loader_yields_in_lightnings_order(form: str) -> None:
    calls: list[Any] = []
    module = lightning(form, calls)
    import torch

    stages = DataStages(module, 2, argument_names=["points", "labels"])
    stages.enter("fit")
    batches = iter(stages.loaders("train")[0])
    made = [stages.inputs(next(batches), dataloader_idx=3) for _ in range(2)]
    stages.leave("fit")
    expected = 2 * (np.arange(8, dtype=np.float32).reshape(4, 2) + 100)
    for number, inputs in enumerate(made):
        points = inputs["points"]["first"] if form == "dict" else inputs["points"]
        assert points.is_global
        np.testing.assert_array_equal(points.numpy(), expected[2 * number : 2 * number + 2])
        assert set(inputs.keys()) == {"dict": {"points", "labels", "added"}, "tuple": {"points", "labels"}}.get(
            form, {"points"}
        )
    assert calls[:3] == [("before", 3, (2, 2)), ("transfer", 3, torch.device("cpu")), ("after", 3, torch.Tensor)]
    assert len(calls) == 6


def test_hooks_keep_the_layouts_of_fields_and_the_batch_that_was_given() -> None:
    from libai_data.engine.datamodule.data_stages import changed_by_hooks

    module = lightning("dict", [])
    array = np.ones((2, 2), np.float32)
    batch = Instance(points={"first": DistTensorData(array, ["split_0", "split_1"], -1)}, labels=np.arange(2))
    changed = changed_by_hooks(module, batch, 0, None)
    field = changed.get("points")["first"]
    assert (field.sbp_list, field.placement_idx, field.tensor.numpy().tolist()) == (
        ["split_0", "split_1"],
        -1,
        [[202, 202]] * 2,
    )
    assert not batch.has("added")


def test_a_module_without_hooks_of_its_own_is_not_asked() -> None:
    pl = pytest.importorskip("pytorch_lightning")
    from libai_data.engine.datamodule.data_stages import overrides_hooks

    assert not overrides_hooks(pl.LightningDataModule())
    assert overrides_hooks(lightning("dict", []))


def test_hooks_can_ask_the_trainer_what_runs(tmp_path: Path) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    asked: list[str] = []

    class Asking(pl.LightningDataModule):  # type: ignore[name-defined]
        def train_dataloader(self) -> Any:
            data = TinyDataset(40)
            tensors = TensorDataset(torch.from_numpy(data.points), torch.from_numpy(data.labels))
            return DataLoader(tensors, 8)

        val_dataloader = test_dataloader = predict_dataloader = train_dataloader

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            states = ("training", "validating", "testing", "predicting")
            asked.extend(state for state in states if getattr(self.trainer, state))
            return batch

    trainer = with_module(config(tmp_path, train_iter=5), Asking())
    assert list(dict.fromkeys(asked)) == ["training", "validating"]
    for stage, state in (("validate", "validating"), ("test", "testing")):
        asked.clear()
        trainer.evaluate(stage)
        assert set(asked) == {state}
    asked.clear()
    trainer.predict()
    assert set(asked) == {"predicting"}
    assert trainer.training


class TwoTasks(TinyModel):
    """Learns from two loaders at once. In a graph, `self` is no TwoTasks."""

    def forward(self, first: Any, second: Any = None) -> dict[str, Any]:
        if second is None:
            return TinyModel.forward(self, **first)
        losses = [TinyModel.forward(self, **each)["loss"] for each in (first, second)]
        return {"loss": losses[0] + losses[1]}


def streamed(length: int, seed: int) -> Any:
    def rows(epoch: int) -> Any:
        dataset = TinyDataset(length, seed=seed)
        return (dataset[int(index)] for index in np.random.default_rng(epoch).permutation(length))

    return rows


class Together(DataModule):
    """Two training loaders of unequal lengths, in a dict or a list."""

    def __init__(self, kind: str, ends: str = "cycle") -> None:
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        loaders = {
            "first": from_iterable(streamed(40, 0), 8, ends="cycle"),
            "second": from_iterable(streamed(20, 1), 8, ends=self.hparams.ends),
        }
        return loaders if self.hparams.kind == "dict" else list(loaders.values())


@pytest.mark.parametrize("graph", [False, slowly(True)])
def test_several_training_loaders_train_together_and_resume_bit_for_bit(tmp_path: Path, graph: bool) -> None:
    def job(folder: Path) -> Any:
        cfg = config(folder, graph=graph)
        cfg.model = LazyCall(TwoTasks)(ballast=cfg.model.ballast)
        OmegaConf.update(cfg, "train.evaluation.enabled", False)
        return cfg

    whole = with_module(job(tmp_path / "whole"), Together("dict"))
    assert isinstance(whole.train_loader, CombinedLoader)
    with_module(job(tmp_path / "list"), Together("list"))
    assert metric(tmp_path / "list") == metric(tmp_path / "whole")
    with_module(job(tmp_path / "cut"), Together("dict"), stop_after=7)
    resumed = with_module(job(tmp_path / "cut"), Together("dict"), resume=True)
    assert resumed.start_iter == 5
    assert metric(tmp_path / "cut") == metric(tmp_path / "whole")


def test_the_shorter_of_several_loaders_begins_anew() -> None:
    stages = DataStages(Together("dict", ends="pad"))
    (loader,) = stages.loaders("train")
    batches = iter(loader)
    found = [next(batches) for _ in range(4)]
    second = [batch.second.labels.tensor.numpy() for batch in found]
    assert sum(len(labels) for labels in second[:3]) == 24
    again = from_iterable(streamed(20, 1), 8, ends="pad")
    rounds = [[batch.labels.tensor.numpy() for batch in again] for _ in range(2)]
    np.testing.assert_array_equal(np.stack(second), np.stack([*rounds[0], rounds[1][0]]))
    stages.leave("fit")


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_lightnings_combined_loader_resumes_after_any_batch(mode: str) -> None:
    pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.trainer.supporters import CombinedLoader as LightningsLoader
    from torch.utils.data import DataLoader

    class Combined(DataModule):
        def train_dataloader(self) -> Any:
            parts = {name: [{"x": np.float32(i)} for i in range(length)] for name, length in (("a", 6), ("b", 10))}
            return LightningsLoader({name: DataLoader(part, 2) for name, part in parts.items()}, mode)

    def made() -> Any:
        return DataStages(Combined()).loaders("train")[0]

    def read(batches: Any) -> list[list[float]]:
        batch = next(batches)
        return [batch[name]["x"].numpy().tolist() for name in "ab"]

    batches = iter(made())
    whole = [read(batches) for _ in range(9)]
    for cut in range(1, 8):
        loader, resumed = made(), made()
        batches = iter(loader)
        assert [read(batches) for _ in range(cut)] == whole[:cut]
        resumed.load_state_dict(loader.state_dict())
        assert read(iter(resumed)) == whole[cut]


def test_what_several_loaders_cannot_do_is_refused() -> None:
    class Unnamed(DataModule):
        def train_dataloader(self) -> Any:
            return [[{"x": np.ones(2)}]] * 2

    with pytest.raises(ConfigError, match=r"returned a list of 2 loaders, but the model's forward has 1 argument"):
        DataStages(Unnamed(), argument_names=["x"]).loaders("train")

    class Nothing(DataModule):
        def train_dataloader(self) -> Any:
            return {}

    with pytest.raises(ConfigError, match="returned no loader"):
        DataStages(Nothing()).loaders("train")
    loader = CombinedLoader({"a": from_iterable(streamed(8, 0), 4, ends="cycle")})
    with pytest.raises(CheckpointError, match=r"is that of \['b'\], but the loaders are \['a'\]"):
        loader.load_state_dict({"loaders": {"b": {}}})
    with pytest.raises(CheckpointError, match="is that of one loader alone"):
        loader.load_state_dict({"position": 3})
    with pytest.raises(ConfigError, match="loader 'a' of several yields no batch"):
        next(iter(CombinedLoader({"a": []})))
    loader.close()
