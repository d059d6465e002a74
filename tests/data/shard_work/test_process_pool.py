"""Processes that do jobs end with whoever feeds them."""

from __future__ import annotations

import os
import pickle
import threading
import time
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

from libai_data.data.shard_work import process_pool
from libai_data.data.shard_work.process_pool import ProcessPool, Work, WorkError
from libai_data.errors import FormatError
from libai_data.launch import signals
from tests.deadline import stretched, wait_until
from tests.forks import a_fork_that_lives_on
from tests.loader.streams import is_running


def test_processes_end_with_their_parent_although_a_fork_of_it_lives_on() -> None:
    pool = ProcessPool(Work(len, str))
    assert pool.do("job") == 3
    with a_fork_that_lives_on():
        # All that the parent's end would close of it.
        pool._parent_pipe.close_parents_end()
        wait_until(lambda: pool._all[0].poll() is not None, "end of the first process")
    pool.close()


def _fork_that_sleeps(seconds: float) -> int:
    child = os.fork()
    if not child:
        time.sleep(seconds)
        os._exit(0)
    return child


def test_what_a_process_forked_ends_with_the_pool() -> None:
    pool = ProcessPool(Work(_fork_that_sleeps, str))
    forked = pool.do(1000.0)

    # The fork has the pipe of the answer, too.
    def wait_for_answer() -> None:
        with suppress(EOFError, ValueError):
            pickle.load(pool._all[0].stdout)  # type: ignore[arg-type]

    waiting = threading.Thread(target=wait_for_answer, daemon=True)
    waiting.start()
    pool.close()
    wait_until(lambda: not waiting.is_alive() and not is_running(forked), "end of the fork")


def _shared_memory(size: int) -> str:
    return SharedMemory(create=True, size=size).name


def test_shared_memory_that_a_process_left_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_SECONDS_TO_CLEAN_UP", 60)
    pool = ProcessPool(Work(_shared_memory, str))
    left = Path("/dev/shm", pool.do(4096))
    assert left.exists()
    pool.close()
    assert not left.exists()


def _fail(error: Exception) -> None:
    raise error


def test_an_error_of_this_package_is_one_line_and_any_other_has_its_traceback() -> None:
    pool = ProcessPool(Work(_fail, lambda job: "the job"))
    with pytest.raises(WorkError, match=r"^the job failed: record 3 is damaged$"):
        pool.do(FormatError("record 3 is damaged"))
    with pytest.raises(WorkError, match=r"^the job failed:\nTraceback (.|\n)*_fail(.|\n)*KeyError: 'text'\n$"):
        pool.do(KeyError("text"))
    pool.close()


def test_the_garbage_collector_may_close_a_pool_while_one_of_its_threads_starts_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, errors = ProcessPool(Work(len, str)), []

    def start(parent_pipe: Any) -> Any:
        pool.close()
        raise WorkError("the work was ended")

    def work() -> None:
        try:
            pool.do("job")
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(process_pool, "_start", start)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(stretched(10))
    assert errors, "the thread waits for its own lock"
    assert isinstance(errors[0], WorkError)
