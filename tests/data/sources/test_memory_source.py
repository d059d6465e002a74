"""Records in memory: read once on a machine, found by every process, gone with the last one."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from libai_data.data.datasets import BlendedDataset, FilteredDataset, Map, RandomMap
from libai_data.data.random.sample_random import sample_generator
from libai_data.data.samplers import CyclicSampler
from libai_data.data.sources import InMemorySource, JsonLinesSource
from libai_data.data.sources.node_memory import shared_memory
from libai_data.errors import ConfigError, PeerError, SampleError
from libai_data.loader.shipping import ship, unship
from tests.data.sources.record_files import texts, write
from tests.deadline import printed_by, wait_until
from tests.forks import a_fork_that_lives_on


def with_draws(number: int, generator: np.random.Generator) -> tuple[float, ...]:
    """A number, and draws from the three generators that a transform may use."""
    return number, generator.random(), np.random.random(), random.random()


class Counted:
    """Records of bytes or numbers, which counts how often it is read, by all processes, in a file.

    Args:
        path: of the file.
        seconds: that reading takes.
        as_bytes: which.
    """

    def __init__(self, path: Path, seconds: float = 0.0, as_bytes: bool = True) -> None:
        self.path, self.seconds, self.as_bytes = path, seconds, as_bytes

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            with open(self.path, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(self.seconds)
        return b"%d" % index * (index % 7) if self.as_bytes else {"number": index}

    def times(self) -> int:
        """How often it was read."""
        return len(self.path.read_text().splitlines())


def test_what_records_draw_is_the_same_each_time_that_they_are_read_into_memory() -> None:
    numbers = list(range(300))
    before = np.random.get_state(legacy=False)["state"]["key"].tolist(), random.getstate()
    first, second, other = (list(InMemorySource(RandomMap(numbers, with_draws), name)) for name in ("a", "a", "b"))
    assert first == second != other
    assert len({draw for record in first for draw in record[1:]}) == 900
    assert (np.random.get_state(legacy=False)["state"]["key"].tolist(), random.getstate()) == before


class ReadTogether:
    """Records that draw, and can be read together."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return with_draws(index, sample_generator())

    def read_many(self, indices: Sequence[int]) -> list[tuple[float, ...]]:
        return [self[index] for index in indices]


def test_what_records_draw_that_are_read_together_is_the_same_each_time() -> None:
    first, second, other = (list(InMemorySource(ReadTogether(), name)) for name in ("a", "a", "b"))
    assert first == second != other
    assert len({draw for record in first for draw in record[1:]}) == 900


@pytest.mark.parametrize("as_bytes", [True, False])
def test_records_are_those_of_the_source_and_read_once(tmp_path: Path, as_bytes: bool) -> None:
    source = Counted(tmp_path / "times", as_bytes=as_bytes)
    memory = InMemorySource(source, f"{tmp_path}")
    expected = [source[index] for index in range(1, 1000)]
    assert len(memory) == 1000 and memory.read_many(range(1, 1000)) == expected and memory[-1] == expected[-1]
    again, shipped = InMemorySource(source, f"{tmp_path}"), pickle.loads(pickle.dumps(memory))
    assert again[5] == shipped[5] == expected[4] and source.times() == 1
    with pytest.raises(IndexError, match="1000 is outside the 1000 records in memory"):
        memory[1000]
    del memory, again, shipped
    # Nobody has it any more, so it is read again.
    assert InMemorySource(source, f"{tmp_path}")[5] == expected[4] and source.times() == 2


def test_files_tell_what_they_hold_and_other_sources_need_a_name(tmp_path: Path) -> None:
    expected = write("jsonl", tmp_path / "a.jsonl", texts(20))
    first = InMemorySource(JsonLinesSource(tmp_path / "a.jsonl"))
    changed = write("jsonl", tmp_path / "a.jsonl", texts(20, seed=9))
    second = InMemorySource(JsonLinesSource(tmp_path / "a.jsonl"))
    assert first.read_many(range(20)) == expected and second.read_many(range(20)) == changed
    with pytest.raises(ConfigError, match="Counted has no identity that distinguishes its records"):
        InMemorySource(Counted(tmp_path / "x"))


def test_a_blend_in_memory_keeps_its_weights_and_a_filter_is_refused() -> None:
    blend = BlendedDataset([[{"x": number}] * 40 for number in range(2)], [3, 1])
    memory = InMemorySource(blend, "a blend")
    assert (CyclicSampler(memory, 4).order.locate(np.arange(40))[1] >= 40).sum() == 10
    # If a loader had set the order of the filter, an index was taken for a place of this order.
    with pytest.raises(ConfigError, match=r"no index of their own; wrap it, as OneRound\("):
        InMemorySource(FilteredDataset(blend, bool), "a filter")


PROGRAM = """
import sys
sys.path[:0] = [{root!r}]
from pathlib import Path
from libai_data.data.sources import InMemorySource
from tests.data.sources.test_memory_source import Counted
memory = InMemorySource(Counted(Path(sys.argv[1]), seconds=float(sys.argv[2])), sys.argv[1])
assert memory[8] == b"8"
print(memory._memory.number, flush=True)
sys.stdin.read()
"""


def start(path: Path, seconds: float, root: Path) -> subprocess.Popen[bytes]:
    """A process that makes the source, tells which memory it has, and waits."""
    command = [sys.executable, "-c", PROGRAM.format(root=str(root)), str(path), str(seconds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Let them end, and wait for it."""
    for process in processes:
        printed_by(process)


def test_processes_that_begin_together_share_memory_read_once_also_after_the_first_is_killed(
    tmp_path: Path, repository: Path
) -> None:
    path = tmp_path / "times"
    processes = [start(path, 0.5, repository) for _ in range(3)]
    numbers = {process.stdout.readline() for process in processes if process.stdout}
    assert len(numbers) == 1 and Counted(path).times() == 1
    reader = next(each for each in processes if each.pid == int(path.read_text()))
    reader.send_signal(signal.SIGKILL)
    reader.wait()
    others = [each for each in processes if each is not reader]
    assert all(each.poll() is None for each in others)
    end([*others, reader])


def test_when_the_process_that_reads_is_killed_another_one_reads(tmp_path: Path, repository: Path) -> None:
    path = tmp_path / "times"
    first = start(path, 60, repository)
    wait_until(lambda: path.exists() and path.read_text(), "process that reads")
    second = start(path, 0, repository)
    first.send_signal(signal.SIGKILL)
    assert second.stdout is not None and int(second.stdout.readline())
    assert Counted(path).times() == 2
    end([first, second])


def test_a_forked_child_does_not_keep_the_name_of_the_memory(tmp_path: Path) -> None:
    source = Counted(tmp_path / "times")
    memory = InMemorySource(source, f"fork {tmp_path}")
    with a_fork_that_lives_on():
        del memory
        assert len(InMemorySource(source, f"fork {tmp_path}")) == 1000 and source.times() == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_name_that_another_user_has_taken_is_refused_with_the_socket(tmp_path: Path) -> None:
    def squat() -> socket.socket:
        os.setuid(65534)
        squatter = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        squatter.bind(f"\0libai_data/memory/0/{tmp_path}")
        squatter.listen()
        return squatter

    told = f"user 65534 has the socket .*{tmp_path}"
    with a_fork_that_lives_on(squat), pytest.raises(PeerError, match=told):
        shared_memory(str(tmp_path), lambda descriptor: None)


def test_workers_map_the_memory_instead_of_a_copy(tmp_path: Path) -> None:
    memory = InMemorySource(Counted(tmp_path / "times"), f"ship {tmp_path}")
    shipment = ship(memory)
    try:
        assert os.fstat(shipment.descriptor).st_size < len(memory._memory.array)
        assert unship(shipment.descriptor)._memory.number == memory._memory.number
    finally:
        shipment.close()


def test_what_reading_raises_comes_out_and_the_next_attempt_is_free() -> None:
    name = f"failing {os.getpid()}"

    def fail(descriptor: int) -> None:
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError, match="gone"):
        shared_memory(name, fail)

    def fill(descriptor: int) -> None:
        os.write(descriptor, b"x")

    assert bytes(shared_memory(name, fill).array) == b"x"


@pytest.mark.parametrize(
    ("function", "message"),
    [(lambda sample: 1 // sample, "by zero"), (lambda sample: sample or (lambda: 0), "pickle")],
)
def test_a_record_that_cannot_be_kept_in_memory_is_named(function: Callable[[int], Any], message: str) -> None:
    with pytest.raises(SampleError, match=f"record 1 of Map cannot be kept in memory: .*{message}"):
        InMemorySource(Map([2, 0, 2], function), f"bad {os.getpid()}")


def test_memory_is_shared_for_longer_than_the_timeout_of_other_sockets() -> None:
    name, descriptors = f"timeout {os.getpid()}", []

    def fill(descriptor: int) -> None:
        descriptors.append(descriptor)
        os.write(descriptor, b"x")

    socket.setdefaulttimeout(0.05)
    try:
        first = shared_memory(name, fill)
        time.sleep(0.2)
        second = shared_memory(name, fill)
    finally:
        socket.setdefaulttimeout(None)
    assert bytes(first.array) == bytes(second.array) == b"x" and len(descriptors) == 1
