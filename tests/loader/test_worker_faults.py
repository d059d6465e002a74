"""Workers that die, hang or stop: the stream goes on unchanged, or ends with an error that says what happened."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libai_data.data.samplers import CyclicSampler
from libai_data.errors import SampleError
from libai_data.loader import BatchLoader, executor, processes, retry, threads
from tests.deadline import stretched, wait_until
from tests.loader.sample_datasets import (
    Crashing,
    Exiting,
    ExitingOnce,
    Hanging,
    HangingOnce,
    LeavingChildren,
    Numbers,
    NumbersFilled,
    Printing,
    Slow,
    growing_collator,
    stack_dicts,
)
from tests.loader.streams import content, descriptors, is_running, loading, stream, worker_pids
from tests.pipes import next_line
from tests.properties import slowly

PROCESSES = pytest.mark.parametrize("start_method", ["fork", slowly("spawn")])
DEADLY = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT)


class Killer:
    """Sends signals to random workers of a loader at random moments, while someone else takes batches.

    Between two signals at least one batch is taken, so that the stream's progress is tested as well.
    """

    def __init__(self, loader: BatchLoader, signals: Any, count: int, seed: int, seconds: float = 0.02) -> None:
        self.sent = 0
        self._loader = loader
        self._signals = signals
        self._count = count
        self._random = random.Random(seed)
        self._seconds = seconds
        self._batch_taken = threading.Event()
        self._thread = threading.Thread(target=self._kill, daemon=True)

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, until all signals are sent, and some more."""
        self._thread.start()
        for batch in batches:
            yield batch
            self._batch_taken.set()
            if not self._thread.is_alive():
                break
        yield from islice(batches, 20)

    def _kill(self) -> None:
        while self.sent < self._count:
            self._batch_taken.clear()
            self._batch_taken.wait()
            time.sleep(self._random.random() * self._seconds)
            pid = self._random.choice(worker_pids(self._loader))
            if is_own_child(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, self._random.choice(self._signals))
                    self.sent += 1


def is_own_child(pid: int) -> bool:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
    except OSError:
        return False


class SlowFilled(NumbersFilled):
    def read_batch(self, indices: Any, out: Any) -> None:
        super().read_batch(indices, out)
        time.sleep(0.002)


class SlowDicts(Slow):
    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return {"index": index}


CASES: dict[str, Any] = {
    "samples": (Slow(401, 0.0005), {}, 50),
    "whole batches": (SlowFilled(401), {}, 20),
    "collated": (Slow(401, 0.0005), {"collate_fn": stack_dicts}, 20),
    "collated and growing": (SlowDicts(40, 0.0005), {"collate_fn": growing_collator}, 20),
    "one worker": (Slow(401, 0.0005), {"num_workers": 1}, 20),
    "many workers, short": (Slow(401, 0.0005), {"num_workers": 5, "prefetch": 1}, 20),
    "spawned": (Slow(401, 0.0005), {"start_method": "spawn"}, 15),
    "spawned and collated": (Slow(401, 0.0005), {"start_method": "spawn", "collate_fn": stack_dicts}, 10),
}
SHORT = ("whole batches", "collated and growing")
"""Cases of the short run."""


@pytest.mark.watchdog(120)
@pytest.mark.parametrize(
    ("dataset", "arguments", "kills"),
    [case if name in SHORT else slowly(*case) for name, case in CASES.items()],
    ids=CASES.keys(),
)
def test_the_stream_goes_on_unchanged_while_workers_are_killed(
    dataset: Any, arguments: Any, kills: int, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retry, "DEATHS_ALLOWED", 1000)
    caplog.set_level(logging.ERROR)
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    collate_fn = arguments.get("collate_fn")
    sampler = CyclicSampler(dataset, 4, True, seed=seed)
    cheap = type(dataset)(dataset.size, 0.0) if isinstance(dataset, Slow) else dataset
    before = descriptors()
    with loading(dataset, sampler, **{"num_workers": 2, "start_method": "fork", **arguments}) as loader:
        killer = Killer(loader, DEADLY, kills, seed)
        iterator = iter(loader)
        first = content(next(iterator))
        found = [first] + [content(batch) for batch in killer.watch(iterator)]
        state = loader.state_dict()
        pids = worker_pids(loader)
    assert killer.sent == kills
    del loader, iterator, killer
    assert found == stream(cheap, CyclicSampler(dataset, 4, True, seed=seed), len(found), collate_fn=collate_fn)
    assert state["position"] == 4 * len(found)
    assert not any(is_running(pid) for pid in pids)
    wait_until(lambda: descriptors() <= before, "end of what was opened")


@pytest.mark.parametrize("start_method", ["fork", slowly("spawn")])
def test_what_a_worker_says_before_it_dies_reaches_a_trainer_without_a_descriptor_for_errors(
    start_method: str, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As in notebooks, whose `sys.stderr` has no descriptor, and in services, which may have none at all."""
    for dataset, words in ((Printing(bad=[9]), "the licence has expired"), (Crashing(bad=[9]), "Segmentation fault")):
        for stream_of_errors in (io.StringIO(), None):
            with monkeypatch.context() as patched:
                patched.setattr(sys, "stderr", stream_of_errors)
                with pytest.raises(SampleError, match=rf"(?s)samples \[9\].*{words}"):
                    stream(dataset, batches=4, num_workers=1, start_method=start_method)
            if stream_of_errors is not None:
                assert stream_of_errors.getvalue().count(words) >= 3
            assert words in caplog.text


@PROCESSES
def test_workers_start_where_standard_descriptors_are_closed(start_method: str) -> None:
    script = (
        "import os; [os.close(n) for n in (0, 2)]\n"
        "from tests.loader.sample_datasets import Numbers\n"
        "from tests.loader.streams import stream\n"
        f"found = stream(Numbers(), batches=4, num_workers=2, start_method={start_method!r})\n"
        "assert found == stream(Numbers(), batches=4)\n"
        "print('equal')"
    )
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=path)
    assert result.stdout == "equal\n"


@PROCESSES
def test_an_idle_worker_that_is_killed_is_replaced(start_method: str, caplog: pytest.LogCaptureFixture) -> None:
    dataset = Numbers(200)
    with loading(dataset, num_workers=2, start_method=start_method, prefetch=1) as loader:
        iterator = iter(loader)
        found = [content(next(iterator))]
        old = worker_pids(loader)
        for pid in old:
            os.kill(pid, signal.SIGKILL)

        def are_replaced() -> bool:
            found.append(content(next(iterator)))
            return not set(old) & set(worker_pids(loader))

        # Nobody misses an idle worker as long as others keep up; the trainer looks for them once a second.
        wait_until(are_replaced, "worker in the place of another")
    assert found == stream(dataset, batches=len(found))
    told = [record.getMessage() for record in caplog.records if "is replaced" in record.getMessage()]
    assert len(told) == 2
    assert all(re.match(r"Worker \d \(process \d+\) was ended by SIGKILL \(out of memory\?\)", text) for text in told)


@pytest.mark.parametrize(("dataset", "how"), [(Exiting, "exit code 7"), (Crashing, "SIGSEGV")])
@pytest.mark.parametrize("bad", [0, 9])
def test_a_sample_that_ends_its_worker_again_and_again_ends_the_run(
    dataset: Any, how: str, bad: int, caplog: pytest.LogCaptureFixture
) -> None:
    with loading(dataset(bad=[bad]), num_workers=2, start_method="fork") as loader:
        iterator = iter(loader)
        with pytest.raises(SampleError) as raised:
            for _ in range(4):
                next(iterator)
        assert re.search(rf"\b{bad}\b", str(raised.value))
        assert how in str(raised.value)
        told = [record.getMessage() for record in caplog.records if " again" in record.getMessage()]
        assert len(told) == 3 and all(how in text for text in told), "whatever the loader reads ahead"
        pids = worker_pids(loader)
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("dataset", [Exiting, Crashing, slowly(Hanging)])
def test_a_sample_that_ends_its_workers_is_skipped_where_failing_ones_are(
    dataset: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(processes, "_SECONDS_BETWEEN_LOOKS", 0.1)
    quarantine = tmp_path / "bad.jsonl"
    arguments: dict[str, Any] = {"on_error": "quarantine", "quarantine_file": str(quarantine)}
    limit = {"timeout": stretched(1)} if dataset is Hanging else {}
    found = stream(dataset(bad=[0, 9, 21]), batches=8, num_workers=2, start_method="fork", **limit, **arguments)
    listed = [json.loads(line) for line in quarantine.read_text().splitlines()]
    assert sorted(line["index"] for line in listed) == [0, 9, 21]
    assert all("workers ended over it" in line["error"] for line in listed)
    # The samples that take their places are those that any reader takes which knows of them beforehand.
    assert found == stream(Numbers(), batches=8, **arguments)


def test_a_worker_that_ends_once_over_a_batch_of_many_samples_is_replaced_and_a_bad_sample_in_it_is_found(
    tmp_path: Path,
) -> None:
    def batches(dataset: Any, **arguments: Any) -> Any:
        order = CyclicSampler(dataset, 6000)
        return stream(dataset, order, batches=2, num_workers=2, start_method="fork", **arguments)

    assert batches(ExitingOnce(str(tmp_path), 12_000, [5000])) == batches(Numbers(12_000))
    assert [path.name for path in tmp_path.iterdir()] == ["5000"]
    arguments: dict[str, Any] = {"on_error": "quarantine", "quarantine_file": str(tmp_path / "bad.jsonl")}
    batches(Exiting(12_000, bad=[0, 5000]), **arguments)
    listed = [json.loads(line)["index"] for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert sorted(listed) == [0, 5000]


def test_a_worker_that_ends_after_it_has_read_the_first_sample_takes_no_note_of_a_skipped_one_along(
    tmp_path: Path,
) -> None:
    quarantine = tmp_path / "bad.jsonl"
    arguments = {"on_error": "quarantine", "quarantine_file": str(quarantine)}
    stream(Exiting(bad=[0, 1]), batches=2, num_workers=1, start_method="fork", **arguments)
    assert sorted(json.loads(line)["index"] for line in quarantine.read_text().splitlines()) == [0, 1]


def test_a_hanging_sample_is_found_by_the_timeout_and_its_stacks_are_shown(
    capfd: Any, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(processes, "_SECONDS_BETWEEN_LOOKS", 0.2)
    monkeypatch.setattr(processes, "_SECONDS_TO_PRINT_STACKS", stretched(0.5))
    timeout = stretched(1.5)
    with loading(Hanging(bad=[9]), num_workers=2, start_method="fork", timeout=timeout) as loader:
        iterator = iter(loader)
        found = [content(next(iterator)) for _ in range(2)]
        with pytest.raises(SampleError, match=rf"repeatedly ended on samples \[9\].*timeout {timeout:g} s"):
            next(iterator)
    assert found == stream(Numbers(), batches=2)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert all("of Hanging for" in text and f"timeout {timeout:g} s" in text for text in errors)
    printed = capfd.readouterr().err
    assert printed.count("in fail") == 2
    assert "out of memory" not in "".join(record.getMessage() for record in caplog.records)


def test_a_first_sample_that_hangs_is_found_by_the_timeout(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(processes, "_SECONDS_BETWEEN_LOOKS", 0.2)
    for workers in ({"start_method": "fork"}, {"worker_type": "thread"}):
        with pytest.raises(SampleError, match=r"repeatedly ended on samples \[0\]|reading samples \[0\] for more"):
            stream(Hanging(bad=[0]), batches=1, num_workers=1, timeout=stretched(0.5), **workers)
    assert sum("of Hanging for" in record.getMessage() for record in caplog.records) == 2, "tries of the fork"


def hang_as_it_begins(number: int) -> None:
    time.sleep(1000)


@pytest.mark.parametrize("start_method", ["fork", slowly("spawn")])
def test_a_worker_init_fn_that_hangs_is_named_and_its_stacks_are_shown(
    start_method: str, capfd: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(processes, "_SECONDS_BETWEEN_LOOKS", 0.2)
    monkeypatch.setattr(processes, "_SECONDS_TO_PRINT_STACKS", stretched(0.5))
    options: dict[str, Any] = {"start_method": start_method, "worker_init_fn": hang_as_it_begins}
    with pytest.raises(SampleError, match=r"worker_init_fn has not returned in worker \d .*timeout 1 s.*raise timeout"):
        stream(Numbers(), batches=1, num_workers=2, timeout=1, **options)
    assert "in hang_as_it_begins" in capfd.readouterr().err


def test_a_first_sample_that_comes_too_late_is_not_taken_for_another(monkeypatch: Any) -> None:
    monkeypatch.setattr(threads, "_SECONDS_BETWEEN_LOOKS", 0.05)
    go_on = threading.Event()

    class HeldUp(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 0:
                go_on.wait()
                return {"late": 1}
            return super().__getitem__(index)

    dataset = HeldUp()
    with loading(dataset, num_workers=2, worker_type="thread", timeout=stretched(1), prefetch=2) as loader:
        with pytest.raises(SampleError, match=r"reading samples \[0\] for more"):
            next(iter(loader))
        state = loader.state_dict()
        go_on.set()
        reading: Any = loader._reader._executor  # type: ignore[union-attr]
        wait_until(lambda: not any(reading._working), "thread at rest")
        loader.load_state_dict({**state, "position": 4})
        assert [content(batch) for batch in islice(loader, 3)] == stream(Numbers(), batches=4)[1:]


def test_a_worker_that_hangs_once_is_replaced_and_the_stream_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(processes, "_SECONDS_BETWEEN_LOOKS", 0.2)
    dataset = HangingOnce(str(tmp_path), 64, [9, 30, 50])
    found = stream(dataset, batches=20, num_workers=2, start_method="fork", timeout=stretched(1.5))
    assert found == stream(Numbers(), batches=20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["30", "50", "9"]


def test_a_hanging_thread_is_found_by_the_timeout() -> None:
    go_on = threading.Event()

    class HeldUp(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 9:
                go_on.wait()
            return super().__getitem__(index)

    with loading(HeldUp(), num_workers=2, worker_type="thread", timeout=stretched(1), prefetch=2) as loader:
        iterator = iter(loader)
        next(iterator)
        next(iterator)
        with pytest.raises(SampleError, match=r"thread \d has been reading samples \[[\d, ]*9[\d, ]*\]"):
            next(iterator)
        go_on.set()


@pytest.mark.parametrize("workers", [slowly(1), 2])
@pytest.mark.parametrize("moment", ["idle", "reading"])
def test_stopped_workers_are_found_by_the_timeout(workers: int, moment: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(processes, "_SECONDS_BETWEEN_LOOKS", 0.2)
    dataset: Any = Numbers(200) if moment == "idle" else Slow(200, 0.05)
    with loading(dataset, num_workers=workers, start_method="fork", timeout=stretched(1.5), prefetch=2) as loader:
        iterator = iter(loader)
        found = [content(next(iterator))]
        pending = loader._iteration._pending[-1]  # type: ignore[union-attr]
        while moment == "idle" and not loader._reader.is_done(pending):  # type: ignore[union-attr]
            pass
        stopped = worker_pids(loader)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        found += [content(next(iterator)) for _ in range(8)]
        # As long as others keep up, nobody misses an idle one.
        assert set(stopped) != set(worker_pids(loader))
    assert found == stream(Numbers(200), batches=9)
    assert not any(is_running(pid) for pid in stopped)


@pytest.mark.slow
def test_workers_stopped_at_random_moments_do_not_stop_the_stream(monkeypatch: Any) -> None:
    monkeypatch.setattr(processes, "_SECONDS_BETWEEN_LOOKS", 0.2)
    monkeypatch.setattr(retry, "DEATHS_ALLOWED", 1000)
    dataset = Slow(401, 0.0005)
    seed = random.SystemRandom().randrange(2**32)
    with loading(dataset, num_workers=3, start_method="fork", timeout=stretched(1)) as loader:
        killer = Killer(loader, [signal.SIGSTOP], 6, seed)
        iterator = iter(loader)
        found = [content(next(iterator))] + [content(batch) for batch in killer.watch(iterator)]
    assert found == stream(Numbers(401), batches=len(found))


def test_a_trainer_that_is_away_for_long_finds_its_workers_alive(monkeypatch: Any) -> None:
    """What they have sent meanwhile is heard before they count as hung."""
    monkeypatch.setattr(processes, "_SECONDS_BETWEEN_LOOKS", 0.05)
    dataset = Numbers(400)
    timeout = stretched(1.5)
    with loading(dataset, num_workers=2, start_method="fork", timeout=timeout, prefetch=8) as loader:
        iterator = iter(loader)
        found = [content(next(iterator))]
        before = worker_pids(loader)
        for _ in range(2):
            time.sleep(timeout + 0.5)  # The passing of time is what is tested.
            found += [content(next(iterator)) for _ in range(9)]
        assert worker_pids(loader) == before
    assert found == stream(dataset, batches=19)


def test_a_worker_is_stuck_only_for_seconds_in_which_the_trainer_looks_and_only_with_one_task(monkeypatch: Any) -> None:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(executor, "time", clock)
    stuck = executor.Stuck(2)

    def seconds_after(passed: float, *tasks: Any) -> list[float]:
        clock.now += passed
        stuck.look()
        return [stuck.seconds(worker, task) for worker, task in enumerate(tasks)]

    assert seconds_after(1, 7, None) == [0, 0]
    assert seconds_after(1, 7, None) == [1, 0]
    assert seconds_after(500, 7, 8) == [1, 0], "the trainer was busy, or the job suspended"
    assert seconds_after(1, 7, 8) == [2, 1]
    assert seconds_after(1, 9, 8) == [0, 2]
    assert seconds_after(1, 9, None) == [1, 0]


def test_a_worker_is_missed_even_if_a_child_of_its_own_lives_on(tmp_path: Path) -> None:
    dataset = LeavingChildren(str(tmp_path), 64, [9, 21])
    try:
        found = stream(dataset, batches=16, num_workers=2, start_method="fork")
    finally:
        children = [int(path.read_text()) for path in tmp_path.iterdir()]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    assert found == stream(Numbers(), batches=16)
    assert len(children) == 2


def test_a_worker_that_another_part_of_the_program_has_waited_for_is_replaced() -> None:
    dataset = Numbers(200)
    with loading(dataset, num_workers=1, start_method="fork", prefetch=1) as loader:
        iterator = iter(loader)
        found = [content(next(iterator))]
        [pid] = worker_pids(loader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found += [content(next(iterator)) for _ in range(8)]
    assert found == stream(dataset, batches=9)


def test_killed_workers_leave_no_descriptors_or_zombies() -> None:
    dataset = Numbers(400)
    with loading(dataset, num_workers=2, start_method="fork", prefetch=1) as loader:
        iterator = iter(loader)
        next(iterator)
        before = descriptors()
        gone: list[int] = []
        for _ in range(10):
            gone += worker_pids(loader)
            os.kill(gone[-1], signal.SIGKILL)
            while gone[-1] in worker_pids(loader):
                next(iterator)
        wait_until(lambda: descriptors() <= before, "end of what was opened")
        alive = worker_pids(loader)
        assert not [pid for pid in gone if pid not in alive and Path(f"/proc/{pid}").exists()]


SUSPENDED = """
import itertools, sys, time
import numpy as np
from libai_data import DataLoader, from_iterable

class Slow:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        for _ in range(20):  # In one sleep, the time of the suspension would count.
            time.sleep(0.01)
        return {"x": np.array([index])}

if __name__ == "__main__":
    kind, timeout = sys.argv[1], float(sys.argv[2])
    if kind == "stream":
        loader = from_iterable(lambda: map(Slow().__getitem__, itertools.count()), 1, timeout=timeout)
    else:
        how = {"worker_type": "thread"} if kind == "thread" else {"multiprocessing_context": kind}
        loader = DataLoader(Slow(), 1, num_workers=1, timeout=timeout, **how)
    for row, batch in enumerate(loader):
        print(row, batch["x"].numpy().tolist(), flush=True)
        if row == 6:
            break
    loader.close()
"""


@pytest.mark.parametrize("kind", ["stream", *map(slowly, ("thread", "fork", "spawn"))])
def test_a_job_that_was_suspended_longer_than_the_timeout_continues(
    kind: str, repository: Path, tmp_path: Path
) -> None:
    """By Ctrl-Z and `fg`, or by a scheduler: trainer and workers alike."""
    (tmp_path / "job.py").write_text(SUSPENDED)
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    timeout = stretched(1.5)
    command = [sys.executable, str(tmp_path / "job.py"), kind, str(timeout)]
    job = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    lines = [next_line(job) for _ in range(3)]
    os.killpg(job.pid, signal.SIGSTOP)
    time.sleep(timeout + 2.5)  # The passing of time is what is tested.
    os.killpg(job.pid, signal.SIGCONT)
    told, errors = job.communicate()
    assert "".join([*lines, told]) == "".join(f"{row} [[{row}]]\n" for row in range(7)), errors
    assert "is ended" not in errors and job.returncode == 0
