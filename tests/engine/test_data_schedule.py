"""The trainer's data: growing batches, skipped steps, resumes that differ on purpose, and what the log says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data import DataModule, from_iterable
from libai_data.config import LazyCall
from libai_data.data.samplers import Ledger, Order
from libai_data.engine.saved_data_state import SavedState, in_words
from libai_data.errors import CheckpointError, ConfigError
from tests.engine.data_runs import RecordingTrainer, config_of, metric, train
from tests.engine.tiny import TinyDataset
from tests.properties import slowly


def samples(steps: dict[int, list[int]]) -> list[int]:
    return [index for step in sorted(steps) for index in steps[step]]


def stream(count: int, length: int = 40) -> list[int]:
    found: list[int] = Order(length, seed=1234).locate(np.arange(count))[1].tolist()
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RecordingTrainer:
    """A training of 160 samples in which nothing is skipped."""
    return train(config_of(tmp_path_factory.mktemp("whole"), length=160))


SIZES: dict[str, dict[str, Any]] = {
    "micro batches grow": {"train_micro_batch_size": None},
    "as many accumulation steps, larger micro batches": {"train_micro_batch_size": None, "num_accumulation_steps": 2},
    "more accumulation steps": {"train_micro_batch_size": 2},
}


@pytest.mark.parametrize("sizes", ["micro batches grow", *map(slowly, list(SIZES)[1:])])
@pytest.mark.parametrize("cut", [None, slowly(1), 3, slowly(5)])
def test_a_growing_global_batch_keeps_the_stream_and_the_schedule(
    sizes: str, cut: Any, whole: RecordingTrainer, tmp_path: Path
) -> None:
    def config() -> Any:
        ramp = [[0, 4], [3, 8], [6, 16]]
        return config_of(tmp_path / "run", global_batch_size=None, batch_size_schedule=ramp, **SIZES[sizes])

    steps = {}
    if cut is not None:
        steps = train(config(), stop_after=cut).steps
    last = train(config(), resume=cut is not None)
    steps.update(last.steps)
    assert [len(steps[step]) for step in range(12)] == [4] * 3 + [8] * 3 + [16] * 6
    if sizes == "more accumulation steps":
        assert last._trainer.grad_acc_steps == 8
    assert samples(steps) == stream(132)
    consumed = metric(tmp_path / "run", "consumed_samples")
    assert [consumed[step] for step in (2, 5, 11)] == [12, 36, 132]
    epochs = metric(tmp_path / "run", "epoch")
    assert epochs[11] == pytest.approx(132 / 40)
    assert metric(tmp_path / "run", "lr") == metric(Path(whole.cfg.train.output_dir), "lr")


def test_epochs_of_a_growing_batch_are_counted_in_positions(tmp_path: Path) -> None:
    ramp = [[0, 4], [3, 8], [6, 16]]
    cfg = config_of(tmp_path, global_batch_size=None, train_micro_batch_size=2, batch_size_schedule=ramp)
    cfg.train.train_iter, cfg.train.train_epoch = 0, 2
    trainer = train(cfg)
    # 12 + 24 + 3 x 16 samples are the first to reach 80.
    assert trainer.max_iter == 9
    assert cfg.train.samples == 84


def test_skipped_steps_are_left_out_and_the_numbers_of_the_steps_count_on(
    whole: RecordingTrainer, tmp_path: Path
) -> None:
    trainer = train(config_of(tmp_path / "run", length=160, skip_steps=[[3, 4], [8, 8]]))
    assert sorted(trainer.steps) == list(range(12))
    kept = [whole.steps[step] for step in range(12) if step not in (3, 4, 8)]
    assert [trainer.steps[step] for step in range(9)] == kept
    position = metric(tmp_path / "run", "position")
    assert (position[2], position[3], position[11]) == (24, 48, 120)
    assert metric(tmp_path / "run", "consumed_samples")[11] == 96
    ledger = Ledger(trainer.train_loader.stream.state)
    assert all(ledger.samples_of(step)[1].tolist() == trainer.steps[step] for step in range(12))


@pytest.mark.parametrize("skips", [[[4, 7]], slowly([[0, 7]])])
def test_a_skip_named_in_its_middle_leaves_out_the_rest_of_it(
    skips: Any, whole: RecordingTrainer, tmp_path: Path
) -> None:
    train(config_of(tmp_path / "run", length=160), stop_after=5)
    resumed = train(config_of(tmp_path / "run", length=160, skip_steps=skips), resume=True)
    assert resumed.start_iter == 6
    assert resumed.steps[6] == whole.steps[8]
    assert "train.skip_steps leaves out 16 samples more, at places [48, 64)" in (tmp_path / "run/log.txt").read_text()


def test_a_checkpoint_of_another_stream_is_refused_before_a_model_is_built(tmp_path: Path, monkeypatch: Any) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"seed": 5}, r"seed was 1234 and is now 5.*train\.resume_override=\[seed\]"),
        ({"global_batch_size": 16}, r"global_batch_size was 8 and is now 16, after 6 steps"),
        ({"length": 48}, r"samples was 40 and is now 48.*resume_override=\[dataset\]"),
    ]
    train(config_of(tmp_path), stop_after=5)
    monkeypatch.setattr("libai_data.engine.default_trainer.build_configured_model", None)
    for change, message in changes:
        with pytest.raises(CheckpointError, match=message):
            train(config_of(tmp_path, **change), resume=True)


def test_another_batch_size_on_purpose_loses_nothing_and_is_remembered(tmp_path: Path) -> None:
    first = train(config_of(tmp_path), stop_after=5)
    larger: dict[str, Any] = {"global_batch_size": 16, "resume_override": ["global_batch_size"]}
    second = train(config_of(tmp_path, **larger), resume=True, stop_after=7)
    third = train(config_of(tmp_path, global_batch_size=16), resume=True)
    assert samples({**first.steps, **second.steps, **third.steps}) == stream(48 + 6 * 16)
    assert "8, 16 from step 6 on. The stream continues at position 48" in (tmp_path / "log.txt").read_text()
    assert metric(tmp_path, "consumed_samples")[11] == 48 + 96


def test_the_log_counts_the_used_samples_when_datasets_of_other_lengths_move_the_position(tmp_path: Path) -> None:
    def run(length: int, stop_after: int | None, **other: Any) -> Any:
        override = {"resume_override": ["dataset", *other]}
        return train(config_of(tmp_path, length, **override, **other), resume=length != 40, stop_after=stop_after)

    run(40, 3)
    run(100, 7)
    run(60, None, global_batch_size=4)
    used = np.cumsum([8] * 8 + [4] * 4).tolist()
    assert metric(tmp_path, "consumed_samples") == dict(enumerate(used))
    assert metric(tmp_path, "position")[7] == 32 * 100 / 40 + 32
    words = in_words(SavedState.read(str(tmp_path)))
    assert "Used so far: 80 samples, on all ranks together." in "".join(words)


class Stream(DataModule):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def train_dataloader(self) -> Any:
        data = TinyDataset(40)
        return from_iterable(lambda epoch: map(data.__getitem__, range(40)), self.rows, ends="cycle")


def test_the_log_counts_the_used_samples_of_a_stream_whose_batch_size_a_resume_changes(tmp_path: Path) -> None:
    for rows, stop_after in ((8, 5), (16, None)):
        cfg = config_of(tmp_path, global_batch_size=rows)
        del cfg["dataloader"]
        cfg.datamodule = LazyCall(Stream)(rows=rows)
        cfg.train.resume_override = ["global_batch_size"]
        train(cfg, resume=rows == 16, stop_after=stop_after)
    used = np.cumsum([8] * 6 + [16] * 6).tolist()
    assert metric(tmp_path, "consumed_samples") == dict(enumerate(used))


def test_another_seed_on_purpose_says_what_is_repeated_and_then_goes_on(tmp_path: Path) -> None:
    train(config_of(tmp_path), stop_after=5)
    resumed = train(config_of(tmp_path, seed=5, resume_override=["seed"]), resume=True)
    assert resumed.steps[6] == Order(40, seed=5).locate(np.arange(48, 56))[1].tolist()
    assert "epoch 1 after 8 of its 40 samples. Some samples are used twice" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("train_keys", "message"),
    [
        ({"global_batch_size": 32}, r"global_batch_size is 32, but train\.batch_size_schedule ends with 16"),
        ({"global_batch_size": None, "graph": True}, r"a graph is compiled for one"),
        ({"global_batch_size": None, "train_micro_batch_size": 3}, r"batch_size_schedule is .* not a multiple of"),
    ],
)
def test_impossible_schedules_are_refused_by_key(train_keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train(config_of(tmp_path, batch_size_schedule=[[0, 8], [3, 16]], **train_keys))


def test_a_loader_of_another_make_cannot_follow_a_schedule(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("libai_data.engine.default_trainer.build_configured_train_loader", lambda *_: [{}])
    with pytest.raises(ConfigError, match=r"need a loader that can follow them, but the train loader \(list\)"):
        train(config_of(tmp_path, skip_steps=[[1, 2]]))


@pytest.mark.parametrize("sizes", [{}, {"train_micro_batch_size": 2}])
def test_tokens_are_counted_where_each_sample_has_as_many(
    sizes: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(TinyDataset, "tokens_per_sample", 6, raising=False)
    train(config_of(tmp_path, **sizes), stop_after=5)
    train(config_of(tmp_path, **sizes), resume=True)
    assert metric(tmp_path, "consumed_tokens") == {step: 6 * 8 * (step + 1) for step in range(12)}
    log = (tmp_path / "log.txt").read_text()
    assert "epoch 0.200  samples 8  tokens 48" in log
    assert "epoch 2.400  samples 96  tokens 576" in log
