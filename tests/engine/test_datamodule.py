"""A data module by itself: its hyperparameters, its stages, and its loaders without a trainer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from libai_data.delivery.build import build_nlp_train_loader
from libai_data.engine.datamodule.data_stages import DataStages
from libai_data.engine.datamodule.datamodule import DataModule
from libai_data.errors import CheckpointError, ConfigError, DataPipelineError
from libai_data.iterables import from_iterable
from libai_data.structures import batch_info


class Recorded(DataModule):
    """Notes what is asked of it."""

    def __init__(self, size: int, scale: float = 2.0, *, note: str = "", **others: Any) -> None:
        self.save_hyperparameters(ignore="note")
        self.calls: list[Any] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(("setup", stage))

    def teardown(self, stage: str) -> None:
        self.calls.append(("teardown", stage))

    def batches(self) -> list[dict[str, Any]]:
        return [{"x": np.full(3, number, np.float32)} for number in range(self.hparams.size)]

    def train_dataloader(self) -> Any:
        return iter(self.batches())

    def val_dataloader(self) -> Any:
        return [lambda: self.batches(), lambda: self.batches()[:1]]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("before", dataloader_idx))
        return batch

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        return {name: value * self.hparams["scale"] for name, value in batch.items()}


def test_the_arguments_of_init_are_kept_as_hyperparameters_all_or_those_that_are_chosen() -> None:
    module = Recorded(4, note="secret", further=1)
    assert module.hparams == {"size": 4, "scale": 2.0, "further": 1}
    assert module.hparams.size == 4
    module.hparams.scale = 3.0
    assert module.hparams["scale"] == 3.0
    with pytest.raises(AttributeError, match="no hyperparameter 'sise'"):
        _ = module.hparams.sise
    assert DataModule().hparams == {}

    class Chosen(DataModule):
        def __init__(self, a: int, b: int) -> None:
            self.save_hyperparameters("b")

    assert Chosen(1, 2).hparams == {"b": 2}


def test_a_module_goes_through_its_stages_without_a_trainer() -> None:
    module = Recorded(3)
    stages = DataStages(module, train_batch_size=2, test_batch_size=2)
    for _ in range(2):  # Once is enough.
        stages.enter("fit")
    (train,) = stages.loaders("train")
    assert stages.loaders("train")[0] is train
    batch = next(iter(train))
    assert batch.x.shape == (2,)
    inputs = stages.inputs(next(iter(train)), dataloader_idx=1)
    assert inputs["x"].is_global
    assert inputs["x"].numpy().tolist() == [0.0, 2.0]
    validation = stages.loaders("val")
    infos = [[batch_info(batch) for batch in loader] for loader in validation]
    assert [[info.valid for info in each if info is not None] for each in infos] == [[2, 2, 2, 2, 1], [2, 1]]
    assert stages.loaders("test") == []
    stages.leave("fit")
    stages.leave("fit")
    stages.enter("test")
    assert module.calls == ["prepare", ("setup", "fit"), ("before", 1), ("teardown", "fit"), ("setup", "test")]


def test_loaders_of_this_package_stay_what_they_are() -> None:
    dataset = [{"x": np.ones(2)} for _ in range(8)]

    class Ours(DataModule):
        def train_dataloader(self) -> Any:
            return build_nlp_train_loader(from_iterable(dataset, 2).dataset, 4, num_workers=0)

        def val_dataloader(self) -> Any:
            return from_iterable(dataset, 4)

    stages = DataStages(Ours(), 1, 1)
    assert [next(iter(stages.loaders(kind)[0])).x.shape for kind in ("train", "val")] == [(4, 2), (4, 2)]


def test_what_cannot_be_is_refused() -> None:
    stages = DataStages(Recorded(3))
    with pytest.raises(ConfigError, match="Did you mean 'fit'"):
        stages.enter("fitt")
    with pytest.raises(NotImplementedError, match="DataModule has no train_dataloader"):
        DataStages(DataModule()).loaders("train")


@pytest.mark.parametrize("kind", ["train", "val"])
@pytest.mark.parametrize("batch", [(np.zeros((2, 3)), np.zeros(2)), {"x": np.zeros(2)}, np.zeros(2)])
def test_batches_in_the_place_of_loaders_are_refused(kind: str, batch: Any) -> None:
    module = type("Listing", (Recorded,), {f"{kind}_dataloader": lambda self: [batch, batch]})(3)
    stages = DataStages(module, 2, 2, ["x", "y"])
    with pytest.raises(ConfigError, match=rf"{kind}_dataloader of Listing returned a list with .*, return \[batches\]"):
        stages.loaders(kind)


@pytest.mark.parametrize("method", ["prepare_data", "setup", "train_dataloader"])
def test_a_method_that_ends_the_process_is_named(method: str) -> None:
    """Otherwise, a program would look successful, without any training."""
    module = type("Ends", (Recorded,), {method: lambda *arguments, **named: sys.exit(0)})(3)
    with pytest.raises(ConfigError, match=rf"{method} of Ends called sys.exit\(0\); let it return, or raise an error"):
        stages = DataStages(module)
        stages.enter("fit")
        stages.loaders("train")


def with_names(*names: Any, ignore: Any = None) -> DataModule:
    class Own(DataModule):
        def __init__(self, folder: str) -> None:
            self.save_hyperparameters(*names, ignore=ignore)

    return Own("a")


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (
            DataStages,
            [None, 5, object(), len, Recorded],
            r"datamodule is .*(derive it from libai_data.DataModule|an object of it)",
        ),
        (DataStages(Recorded(3)).loaders, ["fit", "x", None, 5, ["train"]], r"kind is .* must be 'train' or 'val'"),
        (
            lambda names: DataStages(Recorded(3), argument_names=names),
            [5, "xy", [5], {"a": 1}, [None]],
            "argument_names is",
        ),
        (with_names, [5, []], "names is"),
        (lambda ignore: with_names(ignore=ignore), [5, [None]], "ignore is"),
        (with_names, ["foler"], r"names 'foler', which is not an argument. Did you mean 'folder'"),
    ],
)
def test_odd_modules_kinds_and_names_are_refused(make: Any, values: list[Any], message: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=message):
            make(value)


@pytest.mark.parametrize("kind", ["val", "test", "predict"])
@pytest.mark.parametrize("made", [list, lambda samples: from_iterable(samples, 2)])
def test_loaders_in_the_place_of_the_method_that_returns_them_are_named(kind: str, made: Any) -> None:
    module = DataModule()
    setattr(module, f"{kind}_dataloader", made([{"x": np.ones(2)}] * 4))
    with pytest.raises(ConfigError, match=f"{kind}_dataloader of DataModule is a .*; it must be a method"):
        DataStages(module, 1, 1).loaders(kind)


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"])
def test_a_hook_that_returns_nothing_is_refused(hook: str) -> None:
    module = DataModule()
    setattr(module, hook, lambda *arguments: None)
    batch = next(iter(from_iterable([{"x": np.ones(2)}] * 4, 2)))
    with pytest.raises(ConfigError, match=f"{hook} of DataModule returned None; return the batch, changed or not"):
        DataStages(module).inputs(batch)


class Pairs:
    """A dataset of samples."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.ones(3), "labels": index % 4}


class IteratedPairs(Pairs):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(4))


@pytest.mark.parametrize("kind", ["train", "val"])
@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (Pairs(), r"{} returned the dataset Pairs; return a loader of it: DataLoader\(dataset, batch_size=\.\.\.\)"),
        (Pairs, "{} returned the class Pairs; return an object of it"),
        (
            IteratedPairs(),
            r"what {} returned \(IteratedPairs\) yields no batches: field 'labels' of the batch is a single number; .* "
            r"DataLoader\(dataset, batch_size=\.\.\.\)",
        ),
        (lambda: iter(IteratedPairs()), r"what {} returned \(function\) yields no batches"),
        (3, "{} returned int, not a loader or a list of loaders"),
        ("digits", "{} returned str, not a loader or a list of loaders"),
    ],
    ids=["dataset", "class", "iterable dataset", "function", "int", "text"],
)
def test_what_is_no_loader_is_named_with_the_method_that_returned_it(kind: str, returned: Any, words: str) -> None:
    module = DataModule()
    setattr(module, f"{kind}_dataloader", lambda: returned)
    with pytest.raises(DataPipelineError, match=words.format(f"{kind}_dataloader of DataModule")):
        next(iter(DataStages(module, 2, 2).loaders(kind)[0]))


NO_MAPPINGS: list[Any] = [None, 5, "x", []]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        *((state, "datamodule is") for state in NO_MAPPINGS),
        *((state, "lacks \\['state'\\]") for state in ({}, {"other": 1})),
        *(({"state": own}, "datamodule.state is") for own in (None, 5, {"a": 1})),
        *(({"state": text}, "a saved state cannot be read") for text in ("x", "[1", '{"__kind__": "torch"}')),
        ({"state": "{}"}, "load_state_dict of Keeps raised KeyError: 'seen', for the state {}"),
    ],
)
def test_a_state_that_is_none_of_a_data_module_is_refused(state: Any, words: str) -> None:
    class Keeps(DataModule):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    with pytest.raises(CheckpointError, match=words):
        DataStages(Keeps()).load_state_dict(state)


def test_a_state_of_any_kind_survives_a_checkpoint_and_none_is_not_loaded() -> None:
    class Keeps(DataModule):
        def state_dict(self) -> Any:
            return None

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(state)

    DataStages(Keeps()).load_state_dict(DataStages(Keeps()).state_dict())

    class Counting(DataModule):
        seen: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    for kept in (3, np.float32(2.5), {"a": (1, 2)}):
        saved, restored = Counting(), Counting()
        saved.seen = kept
        DataStages(restored).load_state_dict(DataStages(saved).state_dict())
        assert restored.seen == kept
