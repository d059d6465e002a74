"""What this process and its children use is not taken for others' use."""

from __future__ import annotations

import subprocess
import sys
import time

from libai_data.benchmark.disturbance import Onlooker, descendants

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
