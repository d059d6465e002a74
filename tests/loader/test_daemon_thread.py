"""A Ctrl-C while a loader starts its threads leaves no thread, and stays a Ctrl-C."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from libai_data.loader.batch_loader import BatchLoader
from libai_data.loader.daemon_thread import DaemonThread
from tests.deadline import run_to_end, wait_until
from tests.loader.sample_datasets import Numbers
from tests.loader.streams import loader_threads


def test_a_thread_runs_although_a_ctrl_c_comes_when_its_start_takes_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    enter, main_thread = threading.Condition.__enter__, threading.get_ident()

    def interrupted(condition: threading.Condition) -> bool:
        enter(condition)
        # Not by `current_thread`, which makes a `Condition` itself if the thread is not yet known.
        if threading.get_ident() == main_thread:
            raise KeyboardInterrupt
        return True

    ran: SimpleQueue[str] = SimpleQueue()
    thread = DaemonThread(ran.put, ("ran",), "thread")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "__enter__", interrupted)
        thread.start()
    assert ran.get(timeout=60) == "ran"


def test_threads_end_although_a_ctrl_c_comes_when_the_loader_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    before = loader_threads()

    def interrupted(*_: Any) -> Iterator[Any]:
        raise KeyboardInterrupt

    loader = BatchLoader(Numbers(), [[0, 1], [2, 3]], num_workers=2, worker_type="thread")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(weakref.finalize, "__init__", interrupted)
        next(iter(loader))
    wait_until(lambda: loader_threads() <= before, "end of the threads")
    assert len(list(loader)) == 2
    loader.close()


AT_THE_END = """
from libai_data import from_iterable

class Reads:
    loader = from_iterable(lambda: iter([{"x": 1}]), 1).numpy()

    def __del__(self):
        next(iter(self.loader))

kept = Reads()
"""


def test_a_stream_that_is_read_when_python_ends_raises_an_error() -> None:
    done = run_to_end([sys.executable, "-c", AT_THE_END])
    assert "cannot start while the program ends" in done.stderr
