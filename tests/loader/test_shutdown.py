"""However a trainer ends, its workers end with it, at once, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from libai_data.data.samplers import CyclicSampler, SingleRoundSampler
from libai_data.errors import PassError, SampleError
from libai_data.loader import BatchLoader, starting, worker_pool
from tests.deadline import stretched, wait_until
from tests.forks import a_fork_that_lives_on
from tests.loader.sample_datasets import Numbers, Slow, Tidying
from tests.loader.streams import WORKER_NAMES, WORKERS, content, descriptors, is_running, loading, stream, worker_pids
from tests.pipes import next_line
from tests.properties import few_of, is_long_run, slowly

SCRIPT = Path(__file__).with_name("trainers.py")
REPOSITORY = Path(__file__).parents[2]
MARK = "LOADER_TEST_TRAINER"
FORK = {"num_workers": 2, "start_method": "fork"}
SPAWN = {"num_workers": 2, "start_method": "spawn"}
THREADS = {"num_workers": 2, "worker_type": "thread"}
PROCESSES = pytest.mark.parametrize("workers", [FORK, slowly(SPAWN)], ids=["fork", "spawn"])
ALL = pytest.mark.parametrize("workers", [FORK, slowly(SPAWN), THREADS], ids=["fork", "spawn", "thread"])
SPAWNED_TOO = pytest.mark.parametrize("workers", [FORK, SPAWN], ids=["fork", "spawn"])


class Trainer:
    """A trainer in a process group of its own, with all that it starts."""

    def __init__(self, how: str, folder: Path, arguments: dict[str, Any]) -> None:
        self.mark = f"{MARK}={uuid.uuid4().hex}".encode()
        self.folder = folder
        name, value = self.mark.decode().split("=")
        environment = {**os.environ, name: value, "TMPDIR": str(folder), "PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), how, json.dumps(arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
            cwd=folder,
        )

    def wait_until_begun(self, *more: str) -> None:
        """Wait until it has printed that it has begun, and other lines, in any order."""
        expected = sorted(["begun\n", *more])
        lines = sorted(next_line(self.process) for _ in expected)
        assert lines == expected, self.process.stderr and self.process.stderr.read()

    def family(self) -> list[int]:
        """The trainer and its workers, found by what they inherit."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and is_running(int(name)):
                try:
                    if self.mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        found.append(int(name))
                except OSError:
                    continue
        return found

    def workers(self) -> list[int]:
        return [pid for pid in self.family() if pid != self.process.pid]

    def leaves_nothing(self) -> bool:
        wait_until(lambda: not self.family(), "end of the trainer's workers")
        return not list(self.folder.iterdir())

    def end(self) -> None:
        for pid in self.family():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def is_tied_to_its_trainer(pid: int) -> bool:
    """Whether one of its open files, the pipe of its trainer, sends it a signal."""
    flags = 0
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # It was closed meanwhile.
            flags |= int(path.read_text().split("flags:")[1].split()[0], 8)
    return bool(flags & os.O_ASYNC)


@pytest.fixture()
def start(tmp_path: Path) -> Iterator[Any]:
    trainers: list[Trainer] = []

    def begin(how: str, **arguments: Any) -> Trainer:
        folder = tmp_path / str(len(trainers))
        folder.mkdir()
        trainers.append(Trainer(how, folder, arguments))
        return trainers[-1]

    yield begin
    for trainer in trainers:
        trainer.end()


@PROCESSES
def test_a_killed_trainer_leaves_nothing_whenever_it_is_killed(start: Any, workers: dict[str, Any]) -> None:
    trainers = [start("go_on_for_ever", numpy=True, **workers) for _ in range(4)]
    for trainer in trainers:
        trainer.wait_until_begun()
        assert len(trainer.family()) == 3
        time.sleep(random.random() * 0.1)  # At any moment.
        os.kill(trainer.process.pid, signal.SIGKILL)
        assert trainer.leaves_nothing()


@PROCESSES
def test_a_trainer_that_is_killed_while_its_workers_start_leaves_nothing(start: Any, workers: dict[str, Any]) -> None:
    for _ in range(3 if is_long_run() else 1):
        trainer = start("go_on_for_ever", numpy=True, **workers)
        wait_until(lambda: len(trainer.family()) > 1, "worker")  # noqa: B023
        time.sleep(random.random() * 0.3)
        os.kill(trainer.process.pid, signal.SIGKILL)
        # A worker that is still importing looks for its trainer when it is done with that.
        assert trainer.leaves_nothing()


@SPAWNED_TOO
def test_a_killed_trainer_takes_workers_along_that_are_stuck(start: Any, workers: dict[str, Any]) -> None:
    trainer = start("wait_for_a_held_up_sample", numpy=True, **workers)
    trainer.wait_until_begun("held up\n")
    os.kill(trainer.process.pid, signal.SIGKILL)
    assert trainer.leaves_nothing()


@PROCESSES
def test_a_killed_trainer_takes_stopped_workers_along(start: Any, workers: dict[str, Any]) -> None:
    trainer = start("go_on_for_ever", numpy=True, **workers)
    trainer.wait_until_begun()
    # One worker may still import when the other one has read the first batch.
    wait_until(
        lambda: all(is_tied_to_its_trainer(pid) for pid in trainer.workers()), "worker that is tied to its trainer"
    )
    for pid in trainer.family():
        os.kill(pid, signal.SIGSTOP)
    os.kill(trainer.process.pid, signal.SIGKILL)
    assert trainer.leaves_nothing()


@PROCESSES
@pytest.mark.parametrize("how", ["be_interrupted", slowly("go_on_for_ever")])
def test_ctrl_c_ends_a_trainer_quickly_and_only_it_speaks(start: Any, workers: dict[str, Any], how: str) -> None:
    trainer = start(how, **workers)
    trainer.wait_until_begun()
    time.sleep(random.random() * 0.2)
    os.killpg(trainer.process.pid, signal.SIGINT)
    output, errors = trainer.process.communicate()
    assert trainer.leaves_nothing()
    assert errors.count("Traceback") == errors.count("\nKeyboardInterrupt") == (how == "go_on_for_ever")
    assert ("interrupted" in output) == (how == "be_interrupted")
    assert (trainer.process.returncode == 0) == (how == "be_interrupted")


@pytest.mark.slow
@PROCESSES
def test_ctrl_c_does_not_wait_for_slow_samples(start: Any, workers: dict[str, Any]) -> None:
    trainer = start("be_interrupted", hangs=True, prefetch=8, **workers)
    trainer.wait_until_begun()
    time.sleep(random.random() * 0.5)
    os.killpg(trainer.process.pid, signal.SIGINT)
    trainer.process.communicate()


@PROCESSES
def test_ctrl_c_while_workers_start_lets_only_the_trainer_speak(start: Any, workers: dict[str, Any]) -> None:
    for _ in range(3 if is_long_run() else 1):
        trainer = start("go_on_for_ever", **workers)
        wait_until(lambda: len(trainer.family()) > 2, "second worker")  # noqa: B023
        time.sleep(random.random() * 0.1)
        os.killpg(trainer.process.pid, signal.SIGINT)
        _, errors = trainer.process.communicate()
        assert trainer.leaves_nothing()
        assert errors.count("\nKeyboardInterrupt") <= 1, errors
        assert "worker.py" not in errors


@SPAWNED_TOO
def test_sigterm_ends_a_trainer_and_its_workers(start: Any, workers: dict[str, Any]) -> None:
    trainer = start("go_on_for_ever", **workers)
    trainer.wait_until_begun()
    os.kill(trainer.process.pid, signal.SIGTERM)
    trainer.process.communicate()
    assert trainer.leaves_nothing()


ENDS = {
    "end_without_closing": (0, ""),
    "raise_in_the_loop": (1, "RuntimeError: the model is wrong"),
    "end_after_the_round": (0, ""),
    "call_exit": (3, ""),
    "die_at_once": (-signal.SIGKILL, ""),
}


@pytest.mark.parametrize("workers", [FORK, slowly(SPAWN), slowly(THREADS)], ids=["fork", "spawn", "thread"])
@pytest.mark.parametrize("how", few_of(ENDS, "raise_in_the_loop", "die_at_once"))
def test_every_other_end_is_clean(start: Any, workers: dict[str, Any], how: str) -> None:
    trainer = start(how, **workers)
    trainer.wait_until_begun()
    output, errors = trainer.process.communicate()
    assert trainer.leaves_nothing()
    code, error = ENDS[how]
    assert trainer.process.returncode == code
    assert error in errors
    assert errors.count("Traceback") == (1 if error else 0), errors
    if how == "end_after_the_round":
        assert output.startswith("25\n")


@PROCESSES
def test_workers_live_on_from_round_to_round_and_after_a_break(workers: dict[str, Any]) -> None:
    dataset = Numbers(22)
    with loading(dataset, SingleRoundSampler(dataset, 4), **workers) as loader:
        rounds = [[content(batch) for batch in loader]]
        pids = worker_pids(loader)
        next(iter(loader))
        rounds += [[content(batch) for batch in loader] for _ in range(3)]
        assert worker_pids(loader) == pids
    assert not any(is_running(pid) for pid in pids)
    assert rounds[0] == stream(dataset)
    assert len({str([fields["index"] for _, fields in each]) for each in rounds}) == 1
    assert [info.epoch for each in rounds for info, _ in each] == [epoch for epoch in (0, 2, 3, 4) for _ in rounds[0]]


@ALL
def test_an_iterator_that_is_over_says_why(workers: dict[str, Any]) -> None:
    dataset = Numbers(400)
    with loading(dataset, **workers) as loader:
        older = iter(loader)
        found = [content(next(older)) for _ in range(2)]
        newer = iter(loader)
        with pytest.raises(PassError, match="a newer iterator of this loader has begun"):
            next(older)
        found += [content(next(newer)) for _ in range(2)]
        loader.close()
        for _ in range(2):
            with pytest.raises(PassError, match="the loader was closed"):
                next(newer)
    assert found == stream(dataset, batches=4)


@PROCESSES
def test_closing_is_quick_even_while_workers_start(workers: dict[str, Any]) -> None:
    dataset = Slow(400, 3600.0)
    loader = BatchLoader(dataset, CyclicSampler(dataset, 4), **workers)
    loader._reader = loader._start()
    pids = worker_pids(loader)
    loader.close()
    assert not any(is_running(pid) for pid in pids)


@SPAWNED_TOO
def test_closing_lets_workers_run_their_exit_handlers_and_end_their_children(
    workers: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(worker_pool, "_SECONDS_TO_BEGIN_EXIT", 60)
    monkeypatch.setattr(worker_pool, "_SECONDS_TO_EXIT", 60)
    handlers_of_the_trainer = tempfile.TemporaryDirectory()
    dataset = Tidying(str(tmp_path))
    with loading(dataset, **workers) as loader:
        for _ in islice(loader, 20):
            pass
        names = [path.name for path in tmp_path.iterdir()]
        assert {name.partition("-")[0] for name in names} == {"worker", "child", "folder"}
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("child")] == []
    assert not any(is_running(int(path.name.partition("-")[2])) for path in tmp_path.iterdir())
    # A fork must not do for the trainer what that does at its own end.
    assert Path(handlers_of_the_trainer.name).exists()
    handlers_of_the_trainer.cleanup()


def test_an_exit_handler_runs_to_its_end_while_a_child_process_holds_all_that_the_worker_holds(
    tmp_path: Path, monkeypatch: Any
) -> None:
    begins = stretched(0.5)
    monkeypatch.setattr(worker_pool, "_SECONDS_TO_BEGIN_EXIT", begins)
    monkeypatch.setattr(worker_pool, "_SECONDS_TO_EXIT", 60)
    with loading(Tidying(str(tmp_path), seconds=2 * begins), num_workers=1, start_method="fork") as loader:
        next(iter(loader))
    assert not list(tmp_path.glob("worker-*"))


def test_a_worker_whose_exit_takes_too_long_is_killed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(worker_pool, "_SECONDS_TO_EXIT", 0.3)
    with loading(Tidying(str(tmp_path), seconds=3600), num_workers=1, start_method="fork") as loader:
        next(iter(loader))
        pids = worker_pids(loader)
    assert not any(is_running(pid) for pid in pids)
    for path in tmp_path.glob("child-*"):
        with suppress(ProcessLookupError):
            os.kill(int(path.name.partition("-")[2]), signal.SIGKILL)


def test_a_worker_that_the_system_does_not_let_end_blocks_nobody(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an uninterruptible wait for a file server, a killed process stays until the system lets it go."""
    monkeypatch.setattr(worker_pool, "_SECONDS_TO_BEGIN_EXIT", 0.1)
    monkeypatch.setattr(worker_pool, "_SECONDS_TO_DIE", 0.1)
    monkeypatch.setattr(starting, "_SECONDS_TO_END", 0.1)
    loader = BatchLoader(Numbers(), CyclicSampler(Numbers(), 4), num_workers=2, start_method="fork", prefetch=1)
    iterator = iter(loader)
    next(iterator)
    stuck = loader._reader._executor._pool.processes[0]  # type: ignore[union-attr]
    os.kill(stuck.pid, signal.SIGKILL)
    monkeypatch.setattr(stuck, "_poll", lambda: None)
    with pytest.raises(SampleError, match=rf"process {stuck.pid}.*of Numbers was killed but does not end"):
        while True:
            next(iterator)
    loader.close()
    assert any(f"Process {stuck.pid}" in record.getMessage() for record in caplog.records)
    os.waitpid(stuck.pid, 0)


@PROCESSES
def test_a_loader_that_is_gone_takes_its_workers_along(workers: dict[str, Any]) -> None:
    dataset = Numbers(400)
    before = descriptors()
    loader = BatchLoader(dataset, CyclicSampler(dataset, 4), **workers)
    iterator = iter(loader)
    next(iterator)
    pids = worker_pids(loader)
    del loader, iterator
    gc.collect()
    assert not any(is_running(pid) for pid in pids)
    wait_until(lambda: descriptors() <= before, "end of what was opened")


@ALL
def test_an_iterator_keeps_its_loader(workers: dict[str, Any]) -> None:
    dataset = Numbers(20)
    found = [content(batch) for batch in BatchLoader(dataset, SingleRoundSampler(dataset, 4), **workers)]
    assert found == stream(dataset)


@pytest.mark.parametrize("first", [*WORKERS[1:3], slowly(WORKERS[3])], ids=WORKER_NAMES[1:])
@pytest.mark.parametrize("second", WORKERS[1:], ids=WORKER_NAMES[1:])
def test_two_loaders_at_once_do_not_disturb_each_other(first: dict[str, Any], second: dict[str, Any]) -> None:
    one, other = Numbers(400), Slow(333, 0.0001)
    with loading(one, **first) as training:
        iterator = iter(training)
        found = [content(next(iterator)) for _ in range(3)]
        # Begun later: forked workers inherit what the first loader has open, and must let go of it.
        with loading(other, **second) as evaluation:
            between = iter(evaluation)
            seen = []
            for _ in range(5):
                found.append(content(next(iterator)))
                seen.append(content(next(between)))
            # The first one's workers must end although the second one's live.
            if "start_method" in first:
                pids = worker_pids(training)
                training.close()
                assert not any(is_running(pid) for pid in pids)
            seen += [content(next(between)) for _ in range(5)]
    assert found == stream(one, batches=8)
    assert seen == stream(Numbers(333), batches=10)


def test_workers_end_with_the_trainer_although_a_child_of_the_trainer_lives_on() -> None:
    """A program that the trainer forks, and that goes on, must not keep the workers."""
    dataset = Numbers(400)
    with loading(dataset, **FORK) as loader:
        next(iter(loader))
        with a_fork_that_lives_on():
            pids = worker_pids(loader)
            assert loader._reader is not None
            loader._reader._executor._pool.close_trainer_ends()  # type: ignore[attr-defined]
            wait_until(lambda: all(not is_running(pid) for pid in pids), "end of the workers")


@PROCESSES
def test_a_forked_child_that_ends_normally_does_not_end_the_trainers_workers(workers: dict[str, Any]) -> None:
    dataset = Numbers(400)
    with loading(dataset, **workers) as loader:
        iterator = iter(loader)
        found = [content(next(iterator))]
        pids = worker_pids(loader)
        child = os.fork()
        if child == 0:
            try:
                loader.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        found += [content(next(iterator)) for _ in range(5)]
        assert worker_pids(loader) == pids
        assert all(is_running(pid) for pid in pids)
    assert found == stream(dataset, batches=6)
