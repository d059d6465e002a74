"""A training that is interrupted in a step or an evaluation continues exactly, or says how it can."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from libai_data.config import LazyCall
from libai_data.data.samplers import CyclicSampler
from libai_data.engine import DefaultTrainer, HookBase
from libai_data.engine.checkpoint import Checkpointer
from libai_data.engine.checkpoint.folder import read_state
from libai_data.errors import CheckpointError, SampleError
from libai_data.iterables import DataLoader
from libai_data.mesh import set_mesh
from tests.engine.data_runs import Stopped, metric
from tests.engine.test_default_trainer import built
from tests.engine.test_own_steps import ReadsByNode, ReadsEpochs, ReadsInOrder, ReadsList
from tests.engine.tiny import TinyDataset, assert_equal_weights, tiny_config, weights


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
        monkeypatch.setattr(f"{ReadsEpochs.__module__}.TinyDataset", dataset)
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
    monkeypatch.setattr(f"{ReadsEpochs.__module__}.TinyDataset", FailsLater)
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


def test_a_remedy_after_which_no_checkpoint_can_be_resumed_says_so(tmp_path: Path) -> None:
    keys = {"train_iter": 3, "global_batch_size": 16, "train_micro_batch_size": 8, "evaluation": {"enabled": False}}
    cfg = tiny_config(str(tmp_path), **keys, checkpointer={"period": 1})
    cfg.dataloader.train.dataset = LazyCall(FailsLater)(length=40)
    cfg.dataloader.train.sampler = LazyCall(CyclicSampler)(shuffle=False)
    trainer = built(cfg)
    with pytest.raises(SampleError, match="sample 25"):
        trainer.train()
    with pytest.raises(CheckpointError, match=r"train\(start_iter=1\), after which no checkpoint can be resumed"):
        trainer.train()
    trainer.train(start_iter=1)
    set_mesh(None)
    cfg.train.update(resume=True, train_iter=4)
    with pytest.raises(CheckpointError, match=r"step 3, which begins at position 48, but .* at position 56"):
        built(cfg)


class StopsInItsEvaluation(DefaultTrainer):
    stops_at: ClassVar[int | None] = None
    evaluated: ClassVar[list[int]]

    def _evaluate(self) -> Any:
        self.evaluated.append(self.storage.iter)
        if self.storage.iter == self.stops_at:
            raise Stopped
        return super()._evaluate()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the last weights of a training that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = built(tiny_config(str(folder), log_period=20))
    trainer.train()
    set_mesh(None)
    return folder, weights(trainer.model)


@pytest.mark.parametrize(("stops_at", "resumes"), [(4, True), (9, True), (4, False), (11, True), (11, False)])
def test_a_training_continues_with_the_evaluation_that_was_interrupted(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, stops_at: int, resumes: bool
) -> None:
    StopsInItsEvaluation.stops_at, StopsInItsEvaluation.evaluated = stops_at, []
    cfg = tiny_config(str(tmp_path), log_period=20)
    parts = built(cfg, kind=StopsInItsEvaluation)
    with pytest.raises(Stopped):
        parts.train()
    StopsInItsEvaluation.stops_at = None
    if resumes:
        set_mesh(None)
        cfg.train.resume = True
        parts = built(cfg, kind=StopsInItsEvaluation)
    parts.train()
    again = {4: [4, 4, 9, 11], 9: [4, 9, 9, 11], 11: [4, 9, 11, 11]}
    assert StopsInItsEvaluation.evaluated == again[stops_at]
    assert_equal_weights(parts.model, whole[1])
    assert metric(tmp_path, "Acc@1") == metric(whole[0], "Acc@1")
    best = [read_state(folder / "model_best")["extra"] for folder in (whole[0], tmp_path)]
    assert best[0] == best[1]


def test_the_results_of_a_repeated_evaluation_are_written_before_those_of_the_next_step(tmp_path: Path) -> None:
    StopsInItsEvaluation.stops_at, StopsInItsEvaluation.evaluated = 4, []
    cfg = tiny_config(str(tmp_path))
    cfg.train.evaluation.eval_period = 1
    trainer = built(cfg, kind=StopsInItsEvaluation)
    with pytest.raises(Stopped):
        trainer.train()
    StopsInItsEvaluation.stops_at = None
    trainer.train()
    assert [*metric(tmp_path, "Acc@1")] == [*range(12)]


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


class StopsAfterItsCheckpoint(Checkpointer):
    stops_at = -1

    def save(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().save(name, *args, **kwargs)
        if name == f"model_{self.stops_at:07d}":
            raise Stopped


@pytest.mark.parametrize("patience", [None, 9])
def test_the_numbers_of_a_step_after_whose_checkpoint_a_run_was_stopped_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: int | None
) -> None:
    monkeypatch.setattr("libai_data.engine.default_trainer.Checkpointer", StopsAfterItsCheckpoint)
    lines = []
    for stops_at in (-1, 4):
        cfg = tiny_config(str(tmp_path / str(stops_at)), log_period=5, early_stopping={"patience": patience})
        monkeypatch.setattr(StopsAfterItsCheckpoint, "stops_at", stops_at)
        trainer = built(cfg)
        if stops_at == 4:
            with pytest.raises(Stopped):
                trainer.train()
            cfg.train.resume = True
            set_mesh(None)
            trainer = built(cfg)
        trainer.train()
        set_mesh(None)
        lines.append({name: metric(tmp_path / str(stops_at), name) for name in ("total_loss", "Acc@1", "position")})
    assert lines[0] == lines[1]
    assert [*lines[0]["total_loss"]] == [4, 9, 11]
