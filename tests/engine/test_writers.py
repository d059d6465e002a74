from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from libai_data.atomic_files import AppendFile
from libai_data.config import default_argument_parser
from libai_data.engine import DefaultTrainer, default_setup
from libai_data.engine.events import EventStorage
from libai_data.engine.hooks import EvalHook, PeriodicWriter, ProgressBar
from libai_data.engine.logging_setup import ON_BAR, set_bar, setup_logger
from libai_data.engine.train_loop import HookBase, TrainerBase
from libai_data.engine.writers import CommonMetricPrinter, EventWriter, JSONWriter, TensorboardXWriter
from tests.engine.data_runs import config_of, train
from tests.engine.test_train_loop import CountingTrainer
from tests.engine.tiny import tiny_config
from tests.full_disk import fill, small_disk


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_json_line_averages_what_is_noisy_since_the_line_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    writer = JSONWriter(str(path))
    with EventStorage() as storage:
        for iteration, loss in enumerate([1.0, 3.0, 5.0, 9.0]):
            storage.iter = iteration
            storage.put_scalar("total_loss", loss)
            storage.put_scalar("lr", loss, smoothing_hint=False)
            if iteration % 2:
                writer.write()
    writer.close()
    assert lines_of(path) == [
        {"iteration": 1, "total_loss": 2.0, "lr": 3.0},
        {"iteration": 3, "total_loss": 7.0, "lr": 9.0},
    ]


def test_lines_that_a_resumed_training_repeats_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text("".join(f'{{"iteration": {iteration}, "eval_seconds": 1}}\n' for iteration in (1, 3, 5)))
    writer = JSONWriter(str(path), start_iter=4)
    assert [writer.lacks(iteration) for iteration in (2, 3, 5)] == [True, False, True]
    with EventStorage(4) as storage:
        storage.put_scalar("eval_seconds", 1.0, iteration=4)
        writer.write()
    assert [writer.lacks(iteration) for iteration in (3, 4, 5)] == [False, False, True]


def test_what_is_put_again_for_an_iteration_already_written_is_written_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    writer = JSONWriter(str(path))
    with EventStorage() as storage:
        storage.put_scalar("total_loss", 1.0)
        writer.write()
        storage.put_scalar("Acc@1", 50.0, smoothing_hint=False)
        writer.write()
        writer.write()
    writer.close()
    assert lines_of(path) == [{"iteration": 0, "total_loss": 1.0}, {"iteration": 0, "Acc@1": 50.0}]


def test_a_resumed_run_replaces_the_lines_of_the_steps_it_takes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text('{"iteration": 1, "a": 1}\n{"iteration": 2, "a": 1}\n{"iteration": 3, "a"')
    for start, kept in ((2, [{"iteration": 1, "a": 1}]), (0, [])):
        writer = JSONWriter(str(path), start_iter=start)
        with EventStorage(start):
            writer.write()
        writer.close()
        assert lines_of(path) == kept


def test_a_later_training_replaces_what_an_earlier_one_wrote_of_its_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writers = [JSONWriter(str(tmp_path / "metrics.json")), TensorboardXWriter(str(tmp_path))]
    for start, end in ((0, 4), (4, 5), (2, 4)):
        with EventStorage(start) as storage:
            for storage.iter in range(start, end):
                storage.put_scalar("total_loss", 10 * start + storage.iter)
                for writer in writers:
                    writer.write()
    for writer in writers:
        writer.close()
    expected = [(0, 0.0), (1, 1.0), (2, 22.0), (3, 23.0)]
    assert [(line["iteration"], line["total_loss"]) for line in lines_of(tmp_path / "metrics.json")] == expected
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("total_loss")
    assert [(event.step, event.value) for event in events] == expected


def test_evaluations_that_run_more_often_than_the_log_lines_are_all_written(tmp_path: Path) -> None:
    class Trainer(TrainerBase):
        def run_step(self) -> None:
            self.storage.put_scalar("total_loss", self.iter)

    trainer, path = Trainer(), tmp_path / "metrics.json"
    evaluations = EvalHook(2, lambda: {"Acc@1": 10 * trainer.iter})
    trainer.register_hooks([evaluations, PeriodicWriter([JSONWriter(str(path))], period=5)])
    trainer.train(0, 7)
    found = [(line["iteration"], line.get("Acc@1"), line.get("total_loss")) for line in lines_of(path)]
    assert found == [(1, 10, 0.5), (3, 30, 2.5), (4, None, 4), (5, 50, 5), (6, None, 6), (6, 70, None)]


def test_lines_that_are_no_metrics_do_not_stop_the_writing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_bytes(b'{"iteration": 1, "a": 1}\n\xff\xfe\n{"iteration": "1"}\n[]\n{"iteration": null}\n')
    writer = JSONWriter(str(path), start_iter=2)
    with EventStorage(2) as storage:
        storage.put_scalar("a", 2.0)
        writer.write()
    writer.close()
    assert lines_of(path) == [{"iteration": 1, "a": 1}, {"iteration": 2, "a": 2.0}]


def test_numbers_that_json_has_not_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    writer = JSONWriter(str(path))
    with EventStorage() as storage:
        storage.put_scalar("total_loss", float("nan"))
        writer.write()
    writer.close()
    assert lines_of(path) == [{"iteration": 0, "total_loss": None}]


def test_tensorboard_shows_what_was_put(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorboardXWriter(str(tmp_path))
    with EventStorage() as storage:
        for iteration in range(3):
            storage.iter = iteration
            storage.put_scalar("total_loss", 10.0 - iteration)
            writer.write()
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("total_loss")
    assert [(event.step, event.value) for event in events] == [(0, 10.0), (1, 9.0), (2, 8.0)]


def test_the_log_line_says_loss_rate_waiting_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "libai_data")
    with EventStorage(7) as storage:
        storage.put_scalar("total_loss", 1.25)
        storage.put_scalars(smoothing_hint=False, lr=0.001, time=0.5, samples_per_second=128.0)
        storage.put_scalars(smoothing_hint=False, data_wait_share=0.25, eta_seconds=65.0)
        CommonMetricPrinter(max_iter=100).write()
    assert caplog.messages == [
        "iteration 7/99  loss 1.25  lr 0.001  0.5000 s/step  128.0 samples/s  data wait 25.0%  ETA 0:01:05"
    ]


def test_writers_write_each_period_and_at_the_end_and_are_closed() -> None:
    calls: list[str] = []

    class Noting(EventWriter):
        def write(self) -> None:
            calls.append("write")

        def close(self) -> None:
            calls.append("close")

    trainer = CountingTrainer(calls)
    trainer.register_hooks([PeriodicWriter([Noting()], period=2)])
    trainer.train(0, 3)
    assert calls == ["step 0", "step 1", "write", "step 2", "write", "write", "close"]


def test_the_live_bar_shows_steps_loss_rate_and_waiting(capsys: pytest.CaptureFixture) -> None:
    class Trainer(TrainerBase):
        def run_step(self) -> None:
            self.storage.put_scalar("total_loss", 1.25)
            self.storage.put_scalars(smoothing_hint=False, samples_per_second=1280.0, data_wait_share=0.25)

    trainer = Trainer()
    trainer.register_hooks([ProgressBar()])
    trainer.train(2, 4)
    shown = capsys.readouterr().err.split("\r")[-1]
    for text in ("4/4", "loss=1.25", "samples/s=1280", "data=25%"):
        assert text in shown


@pytest.mark.parametrize("watched", [False, True])
def test_lines_that_the_bar_shows_are_left_out_of_the_terminal_alone(tmp_path: Path, watched: bool) -> None:
    terminal = Terminal()
    logger = setup_logger(str(tmp_path))
    console = logger.handlers[0]
    assert isinstance(console, logging.StreamHandler)
    console.setStream(terminal)
    terminal.watched = watched
    set_bar(True)
    logger.info("a metric", extra=ON_BAR)
    logger.info("an event")
    set_bar(False)
    logger.info("a later metric", extra=ON_BAR)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.endswith(end) for line, end in zip(lines, ("a metric", "an event"))] == [True, True]
    assert "a later metric" in terminal.getvalue()
    assert ("a metric" in terminal.getvalue()) is not watched
    assert "an event" in terminal.getvalue()


class Terminal(io.StringIO):
    """Says of itself whether somebody watches."""

    watched = True

    def isatty(self) -> bool:
        return self.watched


def errors_with(writer: EventWriter, caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What is logged as errors in four steps, each of which is written."""

    trainer = CountingTrainer([])
    trainer.register_hooks([PeriodicWriter([writer], period=1)])
    with caplog.at_level("ERROR", "libai_data"):
        trainer.train(0, 4)
    assert trainer.iter == 4
    return caplog.records


def test_a_log_line_with_a_name_that_is_no_text_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    setup_logger(str(tmp_path)).info("read %s in M\u00fcnchen", os.fsdecode(b"caf\xe9.jpg"))
    terminal.flush()
    assert b"read caf\\udce9.jpg in M\\xfcnchen\n" in terminal.buffer.getvalue()
    assert "read caf\\udce9.jpg in M\u00fcnchen\n" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_a_writer_on_a_full_disk_is_named_once_and_the_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Full(EventWriter):
        tries = 0

        def write(self) -> None:
            self.tries += 1
            if self.tries != 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    full = Full()
    # Before it could write at the third try, and after.
    said = "Full cannot write: [Errno 28] No space left on device. The training continues."
    assert [record.getMessage() for record in errors_with(full, caplog)] == [said, said]
    assert full.tries == 5


def test_a_writer_with_a_bug_is_named_with_its_traceback_and_the_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Wrong(EventWriter):
        def write(self) -> None:
            raise RuntimeError("no such project")

    (record,) = errors_with(Wrong(), caplog)
    assert record.getMessage() == "Wrong cannot write: no such project. The training continues."
    assert record.exc_info is not None


def test_a_file_takes_all_of_a_piece_or_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        file = AppendFile(str(disk / "file"))
        file.append(b"one\n", header=b"begin\n")
        with pytest.raises(OSError, match="No space left"):
            file.append(bytes(100_000))
        file.append(b"two\n", header=b"begin\n")
        file.close()
        assert (disk / "file").read_bytes() == b"begin\none\ntwo\n"


class FillsUp(HookBase):
    """Fills the disk up for the steps 20 to 39; in a step of these, sends a signal."""

    def __init__(self, disk: Path, signal_at: int) -> None:
        self.disk = disk
        self.signal_at = signal_at

    def after_step(self) -> None:
        if self.trainer.iter == 20:
            self.ballast = fill(self.disk)
        if self.trainer.iter == 40:
            self.ballast.unlink()
        if self.trainer.iter == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_disk_that_is_full_for_a_while_costs_what_was_logged_meanwhile_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """More events than tensorboardX's queue holds, on a disk on which nothing fits; then there is room again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with small_disk(tmp_path / "disk", 600) as disk:
        trained_on(disk, signal_at=-1)
        lines = (disk / "log.txt").read_text().splitlines()
        iterations = [line["iteration"] for line in lines_of(disk / "metrics.json")]
        events = EventAccumulator(str(disk)).Reload().Scalars("total_loss")
    # Rounded to pages: what fits into the last page of a file is still written.
    for written in (iterations, [event.step for event in events]):
        assert written == sorted(written)
        assert set(written) > {*range(20), *range(41, 60)}
        assert len(written) < 60
    shown = capfd.readouterr()
    assert shown.err.count("log lines cannot be written to") == 1
    for name in ("JSONWriter", "TensorboardXWriter"):
        assert shown.out.count(f"{name} cannot write: [Errno 28] No space left on device. The training continues.") == 1
    assert "iteration 59/59" in lines[-1] or any("iteration 59/59" in line for line in lines)


def test_a_signal_stops_a_training_whose_disk_is_full(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", 600) as disk,
        pytest.raises(Exception, match="model_0000030 could not be written"),
    ):
        trained_on(disk, signal_at=30)


def trained_on(disk: Path, signal_at: int) -> None:
    cfg = tiny_config(str(disk), train_iter=60)
    cfg.train.evaluation.enabled = False
    cfg.train.checkpointer.period = 1000
    default_setup(cfg, default_argument_parser().parse_args([]))
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([FillsUp(disk, signal_at)])
    trainer.train()


@pytest.mark.parametrize("asked", [None, True, False])
def test_a_bar_is_shown_where_it_is_asked_for_and_breaks_no_log_line(
    asked: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(config_of(tmp_path, train_iter=3, progress_bar=asked))
    printed = capsys.readouterr()
    # There is no terminal here.
    assert ("3/3 [" in printed.err) == bool(asked)
    lines = [line for line in printed.out.splitlines() if "iteration" in line]
    assert len(lines) == 3 + 1 and all(re.match(r"\[\d\d/\d\d .*\] INFO libai_data", line) for line in lines)


@dataclass
class Hashless(EventWriter):
    """A dataclass cannot be an item of a set."""

    closed: bool = False

    def write(self) -> None:
        raise RuntimeError("no network")

    def close(self) -> None:
        self.closed = True


class Unclosable(Hashless):
    def close(self) -> None:
        raise RuntimeError("no network either")


def test_a_writer_that_fails_in_any_way_keeps_neither_the_training_nor_other_writers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writers = [Unclosable(), Hashless()]
    trainer = CountingTrainer([])
    trainer.register_hooks([PeriodicWriter(writers, period=1)])
    with caplog.at_level("ERROR", "libai_data"):
        trainer.train(0, 2)
    assert trainer.iter == 2 and writers[1].closed
    assert [record.getMessage() for record in caplog.records] == [
        "Unclosable cannot write: no network. The training continues.",
        "Hashless cannot write: no network. The training continues.",
        "Unclosable.close() failed.",
    ]


def test_a_file_that_somebody_deletes_is_begun_again_when_its_folder_is_there(tmp_path: Path) -> None:
    file = AppendFile(str(tmp_path / "run" / "log.txt"))
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            file.append(b"lost\n")
        (tmp_path / "run").mkdir()
        file.append(b"one\n", b"head\n")
        file.append(b"two\n", b"head\n")
        assert (tmp_path / "run" / "log.txt").read_text() == "head\none\ntwo\n"
        shutil.rmtree(tmp_path / "run")
    file.close()
