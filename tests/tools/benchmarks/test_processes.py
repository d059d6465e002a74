"""Use of processor, memory and descriptors is that of the right processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.deadline import stretched
from tools.benchmarks.processes import descendants, private_beyond, resident, wait_for_rest

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


def test_a_rest_begins_when_what_another_contender_reads_ahead_is_done(tmp_path: Path) -> None:
    done = tmp_path / "done"
    busy = "import time; end = time.process_time() + 1\nwhile time.process_time() < end: pass"
    process = sleeping(f"import sys; print(flush=True); {busy}\nopen({str(done)!r}, 'w').close()\nsys.stdin.read()")
    wait_for_rest(stretched(50))
    is_done, is_alive = done.exists(), process.poll() is None
    process.communicate()
    assert is_done and is_alive


def growth(code: str, measure: Callable[[int], float]) -> float:
    """By how much a process grows that runs this code and does nothing else."""
    waiting = "print(flush=True); sys.stdin.readline()"
    process = sleeping(f"import mmap, sys; import numpy as np; {waiting}; {code}; {waiting}")
    assert process.stdin is not None and process.stdout is not None
    before = measure(process.pid)
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()
    after = measure(process.pid)
    process.communicate()
    return after - before


OWN = "own = mmap.mmap(-1, 16_000_000, flags=mmap.MAP_PRIVATE); np.frombuffer(own, np.uint8)[...] = 1"


def test_own_memory_is_counted_and_a_mapped_data_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(16_000_000))

    def beyond(pid: int) -> float:
        return private_beyond(pid, str(tmp_path))

    assert growth(OWN, beyond) > 14
    assert growth(OWN, resident) > 14
    assert growth(f"mapped = np.memmap({str(path)!r}, np.uint8, 'r'); mapped.sum()", beyond) < 4
    # Pages that the process copies for itself.
    assert growth(f"copied = np.memmap({str(path)!r}, np.uint8, 'c'); copied[...] = 1", beyond) > 14
