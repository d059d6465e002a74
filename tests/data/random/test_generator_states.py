"""States of random generators, asked for by several threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, sys, threading, time
import {library}
from libai_data.data.random.generator_states import present
generators = [each for each in present() if each.name == {library!r}]
assert generators
# A finalizer that lets other threads run, as any may, wherever objects are made.
gc.callbacks.append(lambda phase, info: time.sleep(1e-6))
gc.set_threshold(5, 2, 2)
def seed():
    if {library!r} == "oneflow":
        from libai_data.engine.checkpoint.random_state import RandomStates
        from libai_data.engine.setup import seed_all
        states = RandomStates(oneflow.nn.Dropout())
        for number in range(5 * {times}):
            seed_all(number)
        states.gather(1)
threads = [threading.Thread(target=lambda: [generators[0].save() for _ in range({times})]) for _ in range(2)]
threads += [threading.Thread(target=seed) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("all have their states")
"""


@pytest.mark.parametrize(("library", "times"), [("torch", 5000), ("oneflow", 300)])
def test_threads_that_ask_for_a_state_while_garbage_is_collected_do_not_wait_for_ever(library: str, times: int) -> None:
    pytest.importorskip(library)
    code = SCRIPT.format(library=library, times=times)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "all have their states\n", result.stderr
