"""A user's own steps and hooks: what they read and change besides the trainer is warned of, or kept."""

from __future__ import annotations

import fcntl
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import oneflow as flow
import pytest

from libai_data.engine import DefaultTrainer, HookBase
from libai_data.engine.checkpoint.folder import read_state
from libai_data.engine.hooks import BestCheckpointer, EvalHook
from libai_data.errors import ConfigError
from libai_data.iterables import DataLoader, from_iterable
from libai_data.mesh import set_mesh
from tests.engine.data_runs import metric
from tests.engine.test_default_trainer import built
from tests.engine.test_odd_parts import BATCH
from tests.engine.tiny import TinyDataset, TinyModel, assert_equal_weights, on_one_rank, tiny_config, weights
from tests.properties import slowly


class ReadsTheTrainLoader(HookBase):
    def before_train(self) -> None:
        next(iter(self.trainer.train_loader))


@pytest.mark.parametrize("hooks", [[], [ReadsTheTrainLoader()]])
def test_a_hook_that_reads_batches_of_the_training_is_warned_of(tmp_path: Path, hooks: list[HookBase]) -> None:
    built(tiny_config(str(tmp_path), train_iter=2), *hooks).train()
    warning = "Before step 1, the train loader is at sample 16 instead of 8: other code, such as a hook, has read its"
    assert (tmp_path / "log.txt").read_text().count(warning) == len(hooks)


class HalvesDecay(DefaultTrainer):
    """Changes the optimizer before each start, also before a resume."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.optimizer.param_groups[0]["weight_decay"] /= 2


class ChangesEps(HookBase):
    def after_step(self) -> None:
        if self.trainer.iter == 2:
            self.trainer.optimizer.param_groups[0]["eps"] = 1e-3


def test_only_what_the_steps_change_in_an_optimizer_is_restored(tmp_path: Path) -> None:
    for steps in (5, 7, 9):
        cfg = tiny_config(str(tmp_path), train_iter=steps, resume=steps > 5, evaluation={"enabled": False})
        trainer = built(cfg, ChangesEps(), kind=HalvesDecay)
        trainer.train()
        set_mesh(None)
        options = trainer.optimizer.param_groups[0].options
        assert (options["weight_decay"], options["eps"]) == (0.05, 1e-3)


class TrainsFirst(DefaultTrainer):
    """Trains a part of the model; a hook adds the other part."""

    kind: Any = flow.optim.AdamW

    @classmethod
    def build_optimizer(cls, cfg: Any, model: Any) -> Any:
        return cls.kind(model.first.parameters(), lr=0.02)


class AddsSecond(HookBase):
    is_added = False

    def before_step(self) -> None:
        if self.trainer.iter >= 2 and not self.is_added:
            self.is_added = True
            self.trainer.optimizer.add_param_group({"params": self.trainer.model.second.parameters(), "lr": 0.01})


@pytest.mark.parametrize("kind", [flow.optim.AdamW, flow.optim.Adagrad, flow.optim.Adadelta])
def test_the_state_of_a_group_that_a_hook_adds_again_after_a_resume_is_restored(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainsFirst, "kind", kind)
    ends: list[Any] = []
    for folder, steps in (("whole", 8), ("parts", 5), ("parts", 8)):
        cfg = tiny_config(str(tmp_path / folder), train_iter=steps, evaluation={"enabled": False})
        cfg.train.resume = len(ends) == 2
        cfg.train.scheduler.max_iter, cfg.train.scheduler.warmup_iter = 8, 0
        trainer = built(cfg, AddsSecond(), kind=TrainsFirst)
        trainer.train()
        set_mesh(None)
        ends.append(weights(trainer.model))
    assert_equal_weights(trainer.model, ends[0])
    assert "add_param_group" not in vars(trainer.optimizer)  # It would keep the state of frozen parameters.
    warning = "The optimizer does not train second.bias, second.weight now, whose state the checkpoint has. If a hook"
    assert (tmp_path / "parts" / "log.txt").read_text().count(warning) == 1


class ChangesOptions(HookBase):
    def before_step(self) -> None:
        if self.trainer.iter == 2:
            self.trainer.optimizer.param_groups[0].options.update(lr=0.5, weight_decay=0.5)


@pytest.mark.parametrize("hooks", [[ChangesOptions()], slowly([])])
def test_options_of_an_optimizer_that_a_graph_ignores_are_warned_of(tmp_path: Path, hooks: list[HookBase]) -> None:
    built(tiny_config(str(tmp_path), train_iter=4, graph=True, evaluation={"enabled": False}), *hooks).train()
    warning = "the optimizer's group of first.weight and 1 more/weight_decay, lr changed. The graph ignores this"
    assert (tmp_path / "log.txt").read_text().count(warning) == len(hooks)
    assert (tmp_path / "log.txt").read_text().count("The graph ignores") == len(hooks)


class ChangesDecayAtFirst(HookBase):
    def before_step(self) -> None:
        if self.trainer.iter == 0:
            self.trainer.optimizer.param_groups[0]["weight_decay"] = 20.0


def test_options_that_a_hook_changes_before_the_first_step_are_compiled(tmp_path: Path) -> None:
    models = []
    for graph in (False, True):
        keys = {"train_iter": 2, "graph": graph, "evaluation": {"enabled": False}}
        trainer = built(tiny_config(str(tmp_path / str(graph)), **keys), ChangesDecayAtFirst())
        trainer.train()
        set_mesh(None)
        models.append(weights(trainer.model))
    for name, value in models[0].items():
        np.testing.assert_allclose(models[1][name], value, rtol=1e-5, atol=1e-7)
    assert "The graph ignores" not in (tmp_path / "True" / "log.txt").read_text()


def test_the_rate_that_a_step_is_made_with_is_logged_also_if_a_hook_has_set_it(tmp_path: Path) -> None:
    built(tiny_config(str(tmp_path), train_iter=4, evaluation={"enabled": False}), ChangesOptions()).train()
    rates = metric(tmp_path, "lr")
    assert rates[2] == 0.5
    assert max(rates[1], rates[3]) <= 0.02


class SkipsAStep(DefaultTrainer):
    def run_step(self) -> None:
        if self.iter != 3:
            super().run_step()


class ReadsByItself(DefaultTrainer):
    """Reads the loader in its own step, twice from step 3 on."""

    batches: Any = None

    def run_step(self) -> None:
        if self.batches is None:
            self.batches = iter(self.train_loader)
        for _ in range(1 if self.iter < 3 else 2):
            next(self.batches)
        self.optimizer.step()


class ReadsListByItself(ReadsByItself):
    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        return [BATCH] * 8


@pytest.mark.parametrize(
    ("kind", "warning"),
    [
        (SkipsAStep, "Before step 4, the train loader is at sample 24 instead of 32: a step has not read its batches"),
        (ReadsByItself, "Before step 4, the train loader is at sample 40 instead of 32: other code, such as a hook, "),
        (ReadsListByItself, "The trainer has read no batch of the train loader (list), so a resume restarts its data"),
    ],
)
def test_a_step_that_reads_other_batches_than_the_trainer_counts_is_warned_of(
    tmp_path: Path, kind: Any, warning: str
) -> None:
    built(tiny_config(str(tmp_path), train_iter=5, evaluation={"enabled": False}), kind=kind).train()
    assert (tmp_path / "log.txt").read_text().count(warning) == 1
    assert "has read its" not in (tmp_path / "log.txt").read_text().partition("Before step 4")[0]


class InterruptsOnce(HookBase):
    """As Ctrl-C in an evaluation after the step. Checks that no other training can use the folder meanwhile."""

    def __init__(self, after: int) -> None:
        self.after = after

    def after_step(self) -> None:
        if self.trainer.iter == self.after:
            self.after = -1
            record = Path(self.trainer.cfg.train.output_dir, "run.json")
            with record.open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise KeyboardInterrupt


class EndsOnce(HookBase):
    def __init__(self, after: int) -> None:
        self.after = after

    def after_step(self) -> None:
        if self.trainer.iter == self.after:
            self.trainer.end_after_step()


class ReadsEpochs(DefaultTrainer):
    readers = "every_rank"

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        return DataLoader(TinyDataset(40), global_batch_size=8, shuffle=True, readers=cls.readers)


class ReadsInOrder(ReadsEpochs):
    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        return DataLoader(TinyDataset(48), global_batch_size=8)


class ReadsByNode(ReadsEpochs):
    readers = "node"


class ReadsList(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        return [*DataLoader(TinyDataset(40), global_batch_size=8)]


class ReadsRows(DefaultTrainer):
    """Reads batches of so many rows, with a loader that does not know the number at first."""

    rows, is_list = 8, True

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        data = TinyDataset(40)
        batches = [
            {"points": data.points[first : first + cls.rows], "labels": data.labels[first : first + cls.rows]}
            for first in range(0, 40, cls.rows)
        ]
        return batches if cls.is_list else from_iterable(batches, batches=True, ends="cycle")


@pytest.mark.parametrize(("rows", "is_list"), [(5, True), (5, False), (8, True), (8, False)])
def test_a_loader_with_batches_of_another_size_than_the_config_is_warned_of(
    tmp_path: Path, rows: int, is_list: bool
) -> None:
    kind = type("Reads", (ReadsRows,), {"rows": rows, "is_list": is_list})
    built(tiny_config(str(tmp_path), train_iter=2, evaluation={"enabled": False}), kind=kind).train()
    log = (tmp_path / "log.txt").read_text()
    assert log.count("have the 8 rows of the config, but inputs of the shapes [(5,), (5, 6)]. So") == (rows == 5)


@pytest.mark.parametrize("kind", [DefaultTrainer, ReadsEpochs, ReadsByNode, ReadsList])
def test_a_training_in_parts_is_that_in_one(tmp_path: Path, kind: Any) -> None:
    cfg = tiny_config(str(tmp_path / "whole"), train_iter=9, evaluation={"enabled": kind is DefaultTrainer})
    whole = built(cfg, kind=kind)
    whole.train()
    set_mesh(None)
    cfg.train.output_dir = str(tmp_path / "parts")
    parts = built(cfg, kind=kind)
    if kind is ReadsByNode:  # Its loader cannot be used again after a whole training.
        parts.train(0, 3)
    else:
        parts.register_hooks([EndsOnce(2)])
        parts.train()
    parts.register_hooks([InterruptsOnce(5)])
    with pytest.raises(KeyboardInterrupt):
        parts.train(max_iter=9)
    parts.train(max_iter=8)
    parts.checkpointer.load(str(tmp_path / "parts" / "model_0000004"))
    parts.train(max_iter=9)
    assert parts.train() == {}  # Nothing is left to do.
    assert metric(tmp_path / "parts") == metric(tmp_path / "whole")
    assert (tmp_path / "parts" / "metrics.json").read_text().count("total_loss") == 9
    assert "has read its" not in (tmp_path / "parts" / "log.txt").read_text()


def test_a_step_that_is_repeated_counts_once_in_the_next_line(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path / "whole"), train_iter=6, evaluation={"enabled": False})
    built(cfg).train()
    set_mesh(None)
    cfg.train.output_dir, cfg.train.log_period, cfg.train.checkpointer.period = str(tmp_path / "parts"), 6, 4
    parts = built(cfg, InterruptsOnce(4))
    with pytest.raises(KeyboardInterrupt):
        parts.train()
    parts.checkpointer.load(str(tmp_path / "parts" / "model_0000003"))
    parts.train()
    whole = metric(tmp_path / "whole")
    assert metric(tmp_path / "parts") == {5: pytest.approx((whole[4] + whole[5]) / 2)}


class InterruptedInTheFirstHook(DefaultTrainer):
    def build_hooks(self) -> list[HookBase | None]:
        return [InterruptsOnce(1), *super().build_hooks()]


class InterruptedBeforeItsHooks(DefaultTrainer):
    after = 1

    def _call_hooks(self, method: str) -> None:
        if (method, self.iter) == ("after_step", self.after):
            self.after = -1
            raise KeyboardInterrupt
        super()._call_hooks(method)


@pytest.mark.parametrize("kind", [InterruptedInTheFirstHook, InterruptedBeforeItsHooks])
def test_an_interrupted_hook_does_not_delay_the_schedule(tmp_path: Path, kind: Any) -> None:
    keys = {"train_iter": 4, "evaluation": {"enabled": False}}
    built(tiny_config(str(tmp_path / "whole"), **keys)).train()
    set_mesh(None)
    parts = built(tiny_config(str(tmp_path / "parts"), **keys), kind=kind)
    with pytest.raises(KeyboardInterrupt):
        parts.train()
    parts.checkpointer.save("mine")
    parts.train()
    whole = metric(tmp_path / "whole", "lr")
    assert metric(tmp_path / "parts", "lr") == {step: rate for step, rate in whole.items() if step != 1}
    state = parts.checkpointer.read(str(tmp_path / "parts" / "mine"))
    assert (state["iteration"], state["stateful"]["lr_scheduler"]["last_step"]) == (1, 2)
    assert {*state["stateful"]["lr_scheduler"]["lr"]} == {whole[2]}


class SavesAfterEachStep(HookBase):
    def after_step(self) -> None:
        self.trainer.checkpointer.save(f"mine_{self.trainer.iter}")


class SavesInTheFirstHook(DefaultTrainer):
    def build_hooks(self) -> list[HookBase | None]:
        return [SavesAfterEachStep(), *super().build_hooks()]


def test_the_checkpoint_of_a_hook_before_the_others_has_the_rate_of_the_next_step(tmp_path: Path) -> None:
    keys = {"train_iter": 4, "evaluation": {"enabled": False}}
    built(tiny_config(str(tmp_path), **keys), kind=SavesInTheFirstHook).train()
    for step, rate in list(metric(tmp_path, "lr").items())[1:]:
        saved = read_state(tmp_path / f"mine_{step - 1}")["stateful"]["lr_scheduler"]
        assert (saved["last_step"], {*saved["lr"]}) == (step, {rate})


class LeavesGradients(HookBase):
    def before_step(self) -> None:
        sum(parameter.sum() for parameter in self.trainer.model.parameters()).backward()


def test_gradients_that_a_hook_has_left_do_not_count(tmp_path: Path) -> None:
    trainers = []
    for hooks in ([], [LeavesGradients()]):
        trainers.append(built(tiny_config(str(tmp_path), train_iter=2, evaluation={"enabled": False}), *hooks))
        trainers[-1].train()
        set_mesh(None)
    assert_equal_weights(trainers[1].model, weights(trainers[0].model))


def test_a_second_call_after_another_training_in_the_folder_is_refused(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path), train_iter=4, evaluation={"enabled": False})
    first = built(cfg)
    first.train(max_iter=2)
    first.train(max_iter=3)
    cfg.train.resume = True
    built(cfg).train()
    message = r"another training \(on .*, process \d+, since 2.*\) has used train.output_dir .* train.resume=True"
    with pytest.raises(ConfigError, match=message):
        first.train(max_iter=4)


def test_a_checkpoint_that_a_user_saves_without_a_step_continues_after_the_last_one(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path), train_iter=6, evaluation={"enabled": False})
    trainer = built(cfg)
    trainer.train(0, 3)
    trainer.checkpointer.save("mine")
    set_mesh(None)
    again = built(tiny_config(str(tmp_path), train_iter=6, resume=True))
    again.checkpointer.save("mine")
    assert (again.start_iter, again.checkpointer.read(str(tmp_path / "mine"))["iteration"]) == (3, 2)


class WithMore(DefaultTrainer):
    """Has a second model, optimizer and loader, as for adversarial and semi-supervised training."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.critics = {"first": flow.nn.Linear(1, 1)}
        self.teacher = flow.nn.Linear(1, 1).requires_grad_(False)
        self.second_optimizer = flow.optim.SGD(self.critics["first"].parameters(), lr=0.1)
        self.part_of_the_model = self.model.first
        self.unlabelled, self.not_read = (DataLoader(TinyDataset(), 4, ends="cycle") for _ in range(2))
        self.web = from_iterable(lambda: map(TinyDataset().__getitem__, range(40)), 4, ends="cycle")

    def run_step(self) -> None:
        next(iter(self.unlabelled))
        next(iter(self.web))
        super().run_step()


class Averages(HookBase):
    """Averages the weights."""

    def before_train(self) -> None:
        self.average = flow.nn.Linear(1, 1)
        self.model = self.trainer.model


class SavesItsAverage(Averages):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("graph, saves", [(False, False), (False, True), (True, False)])
def test_further_parts_that_no_checkpoint_holds_are_named(tmp_path: Path, graph: bool, saves: bool) -> None:
    hooks = [Averages(), SavesItsAverage()] if saves else [Averages()]
    built(tiny_config(str(tmp_path), graph=graph, train_iter=3), *hooks, kind=WithMore).train()
    log = (tmp_path / "log.txt").read_text()
    assert log.count("The checkpoints do not hold") == 1
    names = "trainer.critics['first'] (Linear), trainer.second_optimizer (SGD), trainer.unlabelled (BatchLoader), "
    names += "trainer.web (IterableLoader), Averages.average (Linear)"
    names += " (unless the state of SavesItsAverage does)" * saves
    level = "INFO" if saves else "WARNING"
    assert f"{level} libai_data.engine.parts_as_built: The checkpoints do not hold {names}, so a resume makes" in log


class Remembers(TinyModel):
    """Keeps tensors of its last steps as plain attributes, and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.memories: list[Any] = []
        self.calls = 0

    def forward(self, points: Any, labels: Any = None) -> dict[str, Any]:
        self.calls += 1
        self.first.memory, self.cache = points, np.arange(4)
        self.memories = [points, *self.memories[:1]]
        return super().forward(points, labels)


class Counts(HookBase):
    """Has numbers and tensors that its steps change, and others."""

    def __init__(self) -> None:
        self.steps, self.limit, self.seen = 0, 7, {"losses": [0.0]}
        self.average = flow.zeros(2)
        self.endless: list[Any] = []
        self.endless.append(self.endless)

    def after_step(self) -> None:
        self.steps += 1
        self.seen["losses"].append(1.0)
        self.average += 1


class SavesItsCounts(Counts, SavesItsAverage):
    def before_train(self) -> None:
        pass


class CountsItself(DefaultTrainer):
    calls = 0

    @classmethod
    def build_model(cls, cfg: Any) -> Any:
        return on_one_rank(Remembers())

    def run_step(self) -> None:
        self.calls += 1
        super().run_step()


def test_what_the_steps_change_and_no_checkpoint_holds_is_named_once(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path), train_iter=5, log_period=1, checkpointer={"period": 2})
    built(cfg, Counts(), SavesItsCounts(), kind=CountsItself).train()
    log = (tmp_path / "log.txt").read_text()
    assert log.count("The training changes") == 1
    names = "trainer.calls, Counts.steps, Counts.seen, Counts.average, model.memories, model.first.memory"
    assert f"WARNING libai_data.engine.parts_as_built: The training changes {names}, which the checkpoints do" in log


class CountsTries(BestCheckpointer):
    tries = 0

    def _act(self) -> None:
        self.tries += 1
        super()._act()


@pytest.mark.parametrize(("kind", "named"), [(BestCheckpointer, None), (CountsTries, "CountsTries.tries")])
def test_what_hooks_of_this_package_restore_is_not_named(tmp_path: Path, kind: Any, named: str | None) -> None:
    accuracies = count(1.0)
    hooks = EvalHook(1, lambda: {"Acc@1": next(accuracies)}), kind(1, mock.Mock(), "Acc@1")
    cfg = tiny_config(str(tmp_path), train_iter=5, checkpointer={"period": 1}, evaluation={"enabled": False})
    built(cfg, *hooks).train()
    log = (tmp_path / "log.txt").read_text()
    assert log.count("is the best so far") == 5
    assert log.count("The training changes") == (named is not None)
    assert f"The training changes {named}, which" in log or named is None


@pytest.mark.parametrize("graph", [False, True])
def test_a_training_without_further_parts_is_not_warned_of_any(tmp_path: Path, graph: bool) -> None:
    trainer = built(tiny_config(str(tmp_path), graph=graph, train_iter=6, log_period=1))
    trainer.train(max_iter=3)
    trainer.train()
    log = (tmp_path / "log.txt").read_text()
    assert "The checkpoints do not hold" not in log and "The training changes" not in log


@pytest.mark.parametrize(
    "name, method",
    [
        ("model", "build_model"),
        ("optimizer", "build_optimizer"),
        ("lr_scheduler", "build_lr_scheduler"),
        ("train_loader", "build_train_loader"),
        ("graph_train", "build_graph"),
    ],
)
def test_a_part_that_is_replaced_after_the_trainer_was_made_is_refused(tmp_path: Path, name: str, method: str) -> None:
    trainer = built(tiny_config(str(tmp_path), train_iter=4))
    trainer.train(max_iter=2)
    part, new = getattr(trainer, name), object()
    setattr(trainer, name, new)
    with pytest.raises(ConfigError, match=rf"trainer\.{name} was replaced .*, which would not use .*: let {method} "):
        trainer.train(max_iter=4)
    setattr(trainer, name, part)
    trainer.train(max_iter=4)
    assert trainer.iter == 4


class TrainsACritic(DefaultTrainer):
    """Trains a second model with a second optimizer, whose states a hook saves."""

    inputs: dict[str, Any]

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        flow.manual_seed(self.start_iter)
        self.critic = on_one_rank(TinyModel())
        self.critic_optimizer = flow.optim.Adam(self.critic.parameters(), lr=0.1)
        self.register_hooks([SavesTheCritic()])

    @classmethod
    def get_batch(cls, data: Any, *others: Any) -> dict[str, Any]:
        cls.inputs = super().get_batch(data, *others)
        return cls.inputs

    def run_step(self) -> None:
        super().run_step()
        self.critic(**self.inputs)["loss"].backward()
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()


class SavesTheCritic(HookBase):
    def state_dict(self) -> dict[str, Any]:
        parts = {"model": self.trainer.critic, "optimizer": self.trainer.critic_optimizer}
        return {"local": flow.ones(2), **{name: part.state_dict() for name, part in parts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.critic.load_state_dict(state["model"])
        self.trainer.critic_optimizer.load_state_dict(state["optimizer"])
        assert not state["local"].is_global and state["local"].numpy().tolist() == [1, 1]


def test_a_hook_saves_a_second_model_and_optimizer(tmp_path: Path) -> None:
    whole = built(tiny_config(str(tmp_path / "whole"), train_iter=8), kind=TrainsACritic)
    whole.train()
    for steps in (5, 8):
        set_mesh(None)
        trainer = built(tiny_config(str(tmp_path), train_iter=steps, resume=steps > 5), kind=TrainsACritic)
        trainer.train()
    assert_equal_weights(trainer.critic, weights(whole.critic))
