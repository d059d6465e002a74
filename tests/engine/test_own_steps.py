"""A user's own steps and hooks: what they read and change besides the trainer is warned of, or kept."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import oneflow as flow
import pytest

from libai_data.config import LazyCall
from libai_data.engine import DefaultTrainer, HookBase
from libai_data.engine.checkpoint.folder import read_state
from libai_data.errors import CheckpointError, ConfigError, SampleError
from libai_data.iterables import DataLoader
from libai_data.mesh import set_mesh
from tests.engine.data_runs import Stopped, metric
from tests.engine.test_default_trainer import built
from tests.engine.test_odd_parts import BATCH
from tests.engine.tiny import TinyDataset, assert_equal_weights, tiny_config, weights
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

    @classmethod
    def build_optimizer(cls, cfg: Any, model: Any) -> Any:
        return flow.optim.AdamW(model.first.parameters(), lr=0.02)


class AddsSecond(HookBase):
    is_added = False

    def before_step(self) -> None:
        if self.trainer.iter >= 2 and not self.is_added:
            self.is_added = True
            self.trainer.optimizer.add_param_group({"params": self.trainer.model.second.parameters(), "lr": 0.01})


def test_the_state_of_a_group_that_a_hook_adds_again_after_a_resume_is_restored(tmp_path: Path) -> None:
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


class InterruptedInAStep(ReadsList):
    """As Ctrl-C after one of two micro-batches."""

    after = 0

    @classmethod
    def get_batch(cls, data: Any, input_placement_device: str = "cuda", mixup_func: Any = None) -> dict[str, Any]:
        cls.after -= 1
        if cls.after == 0:
            raise KeyboardInterrupt
        return super().get_batch(data, input_placement_device, mixup_func)


def test_an_interrupted_step_that_has_read_batches_is_neither_continued_nor_saved_but_its_checkpoint_is(
    tmp_path: Path,
) -> None:
    keys = {"train_iter": 3, "global_batch_size": 16, "train_micro_batch_size": 8, "evaluation": {"enabled": False}}
    cfg = tiny_config(str(tmp_path / "whole"), **keys)
    whole = built(cfg, kind=InterruptedInAStep)
    whole.train()
    set_mesh(None)
    cfg.train.output_dir, cfg.train.checkpointer.period = str(tmp_path / "parts"), 1
    parts = built(cfg, kind=InterruptedInAStep)
    InterruptedInAStep.after = 2 * 1 + 2
    with pytest.raises(KeyboardInterrupt):
        parts.train()
    for method in (parts.train, lambda: parts.checkpointer.save("mine")):
        with pytest.raises(CheckpointError, match=r"step 1 has read 2 batch\(es\) and has not ended"):
            method()
    set_mesh(None)
    cfg.train.resume = True
    again = built(cfg, kind=InterruptedInAStep)
    again.train()
    assert_equal_weights(again.model, weights(whole.model))


class ReadsAGenerator(DefaultTrainer):
    """Its loader fails once, in the third batch; the generator then ends."""

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        fails = [2]

        class Loader:
            def __iter__(self) -> Iterator[Any]:
                for number, batch in enumerate(DataLoader(TinyDataset(40), global_batch_size=8)):
                    if number in fails:
                        fails.clear()
                        raise OSError("disk")
                    yield batch

        return Loader()


def test_a_batch_that_a_foreign_loader_has_lost_by_an_error_is_not_left_out(tmp_path: Path) -> None:
    trainer = built(tiny_config(str(tmp_path), train_iter=4, evaluation={"enabled": False}), kind=ReadsAGenerator)
    with pytest.raises(OSError, match="disk"):
        trainer.train()
    with pytest.raises(CheckpointError, match=r"step 2 has read 1 batch\(es\) and has not ended"):
        trainer.train()


class FailsOnce(TinyDataset):
    """Sample 17 cannot be read the first time."""

    fails = 17
    has_failed = False

    def __getitem__(self, index: int) -> Any:
        if index == self.fails and not self.has_failed:
            self.has_failed = True
            raise OSError("disk")
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", [DefaultTrainer, ReadsEpochs, ReadsByNode])
def test_after_a_sample_that_could_not_be_read_the_next_call_reads_it_again(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for dataset in (TinyDataset, FailsOnce):
        cfg = tiny_config(str(tmp_path / dataset.__name__), train_iter=6, evaluation={"enabled": False})
        cfg.dataloader.train.dataset = LazyCall(dataset)(length=40)
        monkeypatch.setattr(f"{__name__}.TinyDataset", dataset)
        trainer = built(cfg, kind=kind)
        if dataset is FailsOnce:
            with pytest.raises(SampleError, match="sample 17 of FailsOnce: OSError: disk"):
                trainer.train()
        trainer.train()
        set_mesh(None)
        losses.append(metric(tmp_path / dataset.__name__))
    assert losses[0] == losses[1]
    assert sorted(losses[0]) == [*range(6)]


class FailsLater(FailsOnce):
    fails = 25


def test_after_a_failed_second_micro_batch_both_remedies_of_the_error_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"train_iter": 3, "global_batch_size": 16, "train_micro_batch_size": 8, "evaluation": {"enabled": False}}
    cfg = tiny_config(str(tmp_path), **keys)
    monkeypatch.setattr(f"{__name__}.TinyDataset", FailsLater)
    trainer = built(cfg, kind=ReadsInOrder)
    with pytest.raises(SampleError, match="sample 25"):
        trainer.train()
    message = r"step 1 has read 1 batch\(es\) .* or without if there is none yet; .* train\(start_iter=1\)"
    with pytest.raises(CheckpointError, match=message):
        trainer.train()
    trainer.train(start_iter=1)
    assert sorted(metric(tmp_path)) == [0, 1, 2]
    set_mesh(None)
    monkeypatch.undo()
    built(cfg, kind=ReadsInOrder).train()


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


class StopsInItsEvaluation(DefaultTrainer):
    stops_at: ClassVar[int | None] = None
    evaluated: ClassVar[list[int]]

    def _evaluate(self) -> Any:
        self.evaluated.append(self.storage.iter)
        if self.storage.iter == self.stops_at:
            raise Stopped
        return super()._evaluate()


@pytest.mark.parametrize("stops_at", [4, 9])
def test_a_resume_begins_with_the_evaluation_that_was_interrupted(tmp_path: Path, stops_at: int) -> None:
    StopsInItsEvaluation.evaluated = []
    for folder, stop, resume in (("whole", None, False), ("parts", stops_at, False), ("parts", None, True)):
        StopsInItsEvaluation.stops_at = stop
        cfg = tiny_config(str(tmp_path / folder), resume=resume, log_period=20)
        trainer = built(cfg, kind=StopsInItsEvaluation)
        with suppress(Stopped):
            trainer.train()
        set_mesh(None)
        if folder == "whole":
            expected = weights(trainer.model)
    assert_equal_weights(trainer.model, expected)
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    assert metric(parts, "Acc@1") == metric(whole, "Acc@1")
    assert read_state(parts / "model_best")["extra"] == read_state(whole / "model_best")["extra"]
    assert StopsInItsEvaluation.evaluated == [4, 9, 11, *([4, 4, 9, 11] if stops_at == 4 else [4, 9, 9, 11])]


class StopsAtTheEnd(HookBase):
    def after_train(self) -> None:
        raise Stopped


class StoppedAtTheEnd(DefaultTrainer):
    def build_hooks(self) -> list[HookBase | None]:
        return [StopsAtTheEnd(), *super().build_hooks()]


def test_a_run_that_was_stopped_between_its_last_step_and_its_end_is_completed(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path / "whole"), train_iter=5)
    results = built(cfg).train()
    cfg.train.output_dir = str(tmp_path / "cut")
    set_mesh(None)
    with pytest.raises(Stopped):
        built(cfg, kind=StoppedAtTheEnd).train()
    assert not (tmp_path / "cut" / "model_final").exists()
    cfg.train.resume = True
    expectations: list[dict[str, Any]] = [results, {}]
    for expected in expectations:
        set_mesh(None)
        assert built(cfg).train() == expected
    for name in ("model_final", "model_best"):
        assert read_state(tmp_path / "cut" / name)["iteration"] == 4
    assert metric(tmp_path / "cut", "Acc@1") == metric(tmp_path / "whole", "Acc@1")


def test_a_checkpoint_that_a_user_saves_without_a_step_continues_after_the_last_one(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path), train_iter=6, evaluation={"enabled": False})
    trainer = built(cfg)
    trainer.train(0, 3)
    trainer.checkpointer.save("mine")
    set_mesh(None)
    again = built(tiny_config(str(tmp_path), train_iter=6, resume=True))
    again.checkpointer.save("mine")
    assert (again.start_iter, again.checkpointer.read(str(tmp_path / "mine"))["iteration"]) == (3, 2)
