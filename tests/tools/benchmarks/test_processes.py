"""Use of processor, memory and descriptors is that of the right processes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tools.benchmarks.processes import Onlooker, descendants, descriptors, private_beyond, resident

SLEEP = "import sys; print(flush=True); sys.stdin.read()"


def sleeping(code: str = SLEEP) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_children_and_their_children_are_found_while_they_live() -> None:
    before = set(descendants())
    parent = sleeping(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()")
    found = set(descendants()) - before
    parent.communicate()
    assert parent.pid in found
    assert len(found) == 2
    assert not (set(descendants()) - before)


def test_own_work_is_never_counted_as_more_than_the_cores_have() -> None:
    onlooker = Onlooker()
    end = time.perf_counter() + 0.1
    while time.perf_counter() < end:
        pass
    assert 0 <= onlooker.others() <= 1


def test_own_memory_is_counted_and_a_mapped_data_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(16_000_000))
    before = private_beyond(os.getpid(), str(tmp_path))
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.sum() > 0
    assert private_beyond(os.getpid(), str(tmp_path)) - before < 4
    own = mmap.mmap(-1, 16_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    np.frombuffer(own, np.uint8)[...] = 1
    assert private_beyond(os.getpid(), str(tmp_path)) - before > 14


def test_pages_of_a_data_file_that_a_process_copies_for_itself_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(16_000_000))
    before = private_beyond(os.getpid(), str(tmp_path))
    copied = np.memmap(path, np.uint8, "c")
    copied[...] = 1
    assert private_beyond(os.getpid(), str(tmp_path)) - before > 14


def test_resident_memory_grows_with_what_is_touched() -> None:
    before = resident(os.getpid())
    own = mmap.mmap(-1, 16_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    np.frombuffer(own, np.uint8)[...] = 1
    assert resident(os.getpid()) - before > 14


def test_open_descriptors_are_counted() -> None:
    before = descriptors(os.getpid())
    first, second = os.pipe()
    assert descriptors(os.getpid()) == before + 2
    os.close(first)
    os.close(second)
