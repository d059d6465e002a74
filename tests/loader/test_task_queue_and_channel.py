"""The task queue and the channels, alone: what must hold whoever dies when."""

from __future__ import annotations

import fcntl
import os
import random
import select
import signal
import socket
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from libai_data.loader import task_queue as board_module
from libai_data.loader.event import Event
from libai_data.loader.stage_times import StageTimes
from libai_data.loader.task_queue import CAPACITY, Entry, TaskQueue
from libai_data.mesh.peers.channel import Channel
from tests.deadline import wait_until
from tests.loader.streams import descriptors


def entry(number: int) -> Entry:
    return Entry(number, 1, 2, 3, 4)


TOOK = StageTimes(1.5, 0.25, 0.125, 8.0, 7)


def test_tasks_are_taken_in_the_order_in_which_they_were_put() -> None:
    task_queue = TaskQueue(2)
    places = [task_queue.put(entry(number)) for number in range(10)]
    assert places == list(range(10))
    taken = [task_queue.take(number % 2) for number in range(10)]
    assert taken == [(number, entry(number)) for number in range(10)]
    assert task_queue.take(0) is None
    assert task_queue.claim(0)[0] == 8
    assert task_queue.claim(1)[0] == 9
    task_queue.close()


def test_the_board_goes_round_and_tells_when_it_is_full() -> None:
    task_queue = TaskQueue(1)
    for number in range(CAPACITY + 100):
        task_queue.put(entry(number))
        assert task_queue.take(0) == (number, entry(number))
    for number in range(CAPACITY):
        task_queue.put(entry(number))
    with pytest.raises(RuntimeError, match="lower prefetch"):
        task_queue.put(entry(0))
    assert task_queue.take(0) == (CAPACITY + 100, entry(0))
    with pytest.raises(RuntimeError, match="lower prefetch"):  # The new task would be where the one that was taken is.
        task_queue.put(entry(0), oldest=CAPACITY + 100)
    task_queue.close()


def test_what_is_done_is_known_with_what_it_took_until_its_place_is_used_again() -> None:
    task_queue = TaskQueue(2)
    for turn in range(3):
        first, second = task_queue.put(entry(1)), task_queue.put(entry(2))
        task_queue.take(1), task_queue.take(0)
        assert not task_queue.is_done(first) and not task_queue.is_done(second)
        assert task_queue.take(1, done=TOOK) is None
        assert task_queue.is_done(first) and not task_queue.is_done(second)
        assert task_queue.times(first) == TOOK
        task_queue.take(0, done=TOOK)
        for _ in range(CAPACITY - 2):
            task_queue.put(entry(turn))
            task_queue.take(0)
    task_queue.close()


def is_set(event: Event) -> bool:
    waiting = select.poll()
    waiting.register(event.fileno(), select.POLLIN)
    return bool(waiting.poll(0))


def test_one_sleeping_worker_is_woken_for_each_task_and_none_that_is_awake() -> None:
    task_queue = TaskQueue(3)
    assert task_queue.take(2) is None and task_queue.take(1) is None
    task_queue.put(entry(0))
    assert [is_set(task_queue.waker(worker)) for worker in range(3)] == [False, True, False]
    task_queue.put(entry(1))
    assert [is_set(task_queue.waker(worker)) for worker in range(3)] == [False, True, True]
    for worker in (1, 2):
        task_queue.waker(worker).clear()
        assert task_queue.take(worker) is not None
    task_queue.put(entry(2))
    assert not any(is_set(task_queue.waker(worker)) for worker in range(3))
    task_queue.close()


def test_where_tasks_cost_little_another_worker_is_woken_only_for_many_or_for_one_that_has_waited_long(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(board_module, "_LONG", 10**12)
    task_queue = TaskQueue(2)
    task_queue.take(1)
    for number in range(3):
        task_queue.put(entry(number), may_wait=3)
        assert not is_set(task_queue.waker(1)), "worker 0 is awake, and can do three tasks by itself"
    task_queue.put(entry(3), may_wait=3)
    assert is_set(task_queue.waker(1))
    task_queue.waker(1).clear()
    assert [task_queue.take(1) is not None for _ in range(5)] == [True] * 4 + [False]

    assert task_queue.take(0) is None
    task_queue.put(entry(0), may_wait=3)
    assert is_set(task_queue.waker(0)), "all slept"
    monkeypatch.setattr(board_module, "_LONG", 0)
    task_queue.put(entry(1), may_wait=3)
    assert is_set(task_queue.waker(1)), "worker 0 has left a task waiting for long"
    task_queue.close()


def test_help_is_called_only_while_tasks_wait() -> None:
    task_queue = TaskQueue(2)
    assert task_queue.take(1) is None
    task_queue.wake()
    assert not is_set(task_queue.waker(1)) and task_queue.seconds_awake(1) == 0
    task_queue.put(entry(0), may_wait=9)
    task_queue.wake()
    assert is_set(task_queue.waker(1)) and task_queue.seconds_awake(1) < 30
    task_queue.close()


def test_the_trainer_is_woken_by_the_task_that_it_waits_for_alone() -> None:
    task_queue = TaskQueue(1)
    first, second, third = (task_queue.put(entry(number)) for number in range(3))
    task_queue.take(0)
    task_queue.take(0, done=TOOK)
    assert not is_set(task_queue.event)
    assert not task_queue.trainer_waits(first)
    assert task_queue.trainer_waits(third)
    task_queue.take(0, done=TOOK)
    assert task_queue.is_done(second) and not is_set(task_queue.event)
    task_queue.take(0, done=TOOK)
    assert is_set(task_queue.event)
    task_queue.close()


def test_what_waits_and_what_is_claimed_are_told_apart() -> None:
    task_queue = TaskQueue(1)
    assert task_queue.seconds_waiting() == 0
    assert task_queue.claim(0) == (None, 0.0)
    first, second = task_queue.put(entry(0)), task_queue.put(entry(1))
    assert task_queue.seconds_waiting() > 0
    task_queue.take(0)
    assert (task_queue.is_waiting(first), task_queue.is_waiting(second)) == (False, True)
    assert task_queue.seconds_waiting() > 0
    place, seconds = task_queue.claim(0)
    assert place == first
    assert 0 <= seconds < 30
    task_queue.clear_claim(0)
    assert task_queue.claim(0) == (None, 0.0)
    task_queue.close()


def test_processes_that_are_killed_at_any_moment_lose_no_task_but_the_one_they_claim() -> None:
    """Takers report what they take; what a killed one had claimed and not reported is put again, as loaders do."""
    task_queue = TaskQueue(3)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    chance = random.Random()
    number_at: dict[int, int] = {}
    reported: list[int] = []

    def take_for_ever(worker: int) -> int:
        pid = os.fork()
        while pid == 0:
            found = task_queue.take(worker)
            if found is not None:
                os.write(writing, found[1].offset.to_bytes(8, "little"))
        return pid

    def all_are_reported() -> bool:
        with suppress(BlockingIOError):
            reported.extend(np.frombuffer(os.read(reading, 1 << 16), np.int64).tolist())
        return set(reported) == set(number_at.values())

    takers = [take_for_ever(worker) for worker in range(3)]
    try:
        number = 0
        for _ in range(25):
            for _ in range(chance.randrange(1, 80)):
                number_at[task_queue.put(entry(number))] = number
                number += 1
            victim = chance.randrange(3)
            os.kill(takers[victim], signal.SIGKILL)
            os.waitpid(takers[victim], 0)
            all_are_reported()
            place, _ = task_queue.claim(victim)
            task_queue.clear_claim(victim)
            if place is not None and not task_queue.is_waiting(place) and number_at[place] not in reported:
                number_at[task_queue.put(entry(number_at[place]))] = number_at[place]
            takers[victim] = take_for_ever(victim)
        wait_until(all_are_reported, "report of all tasks")
        assert len(reported) == number
    finally:
        for pid in takers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
        task_queue.close()


def test_a_process_that_is_stopped_with_the_lock_in_its_hands_does_not_stop_the_trainer(monkeypatch: Any) -> None:
    monkeypatch.setattr(board_module, "_SECONDS_TO_HOLD", 0.2)
    task_queue = TaskQueue(1)
    holder = os.fork()
    if holder == 0:
        fcntl.lockf(task_queue.descriptors[0], fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(holder, os.WUNTRACED)
    place = task_queue.put(entry(0))
    assert os.WTERMSIG(os.waitpid(holder, 0)[1]) == signal.SIGKILL
    assert task_queue.take(0) == (place, entry(0))
    task_queue.close()


@pytest.fixture()
def ends() -> Any:
    left, right = Channel.pair()
    yield left, right
    left.close()
    right.close()


@pytest.mark.parametrize("size", [0, 1, 60_000, 64 * 1024 - 10, 64 * 1024, 70_000, 5_000_000])
def test_messages_of_any_size_arrive_whole(ends: tuple[Channel, Channel], size: int) -> None:
    left, right = ends
    before = descriptors()
    for turn in range(3):
        left.send(("kind", turn, b"x" * size))
        left.send("next")
        assert right.receive() == ("kind", turn, b"x" * size)
        assert right.receive() == "next"
    wait_until(lambda: descriptors() <= before, "end of what was opened")


def test_what_was_sent_before_the_end_closed_is_still_heard(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    right.send("never read")
    left.send("small")
    left.send(b"x" * 100_000)
    left.close()
    assert right.speaks()
    assert right.receive() == "small"
    assert right.receive() == b"x" * 100_000
    with pytest.raises(EOFError):
        right.receive()
    with pytest.raises(OSError):
        right.send("anybody there?")


def test_an_end_speaks_only_when_something_waits(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    assert not right.speaks()
    left.send(1)
    assert right.speaks()
    right.receive()
    assert not right.speaks()


def test_a_sender_waits_for_a_slow_receiver_and_loses_nothing(ends: tuple[Channel, Channel]) -> None:
    left, right = ends

    def send_all() -> None:
        for number in range(500):
            left.send((number, b"x" * 10_000))

    sender = threading.Thread(target=send_all)
    sender.start()
    assert [right.receive()[0] for _ in range(500)] == list(range(500))
    sender.join()


@pytest.mark.parametrize("seconds", [0, 0.01])
def test_a_channel_waits_whatever_timeout_other_sockets_have(seconds: float) -> None:
    socket.setdefaulttimeout(seconds)
    try:
        left, right = Channel.pair()
    finally:
        socket.setdefaulttimeout(None)
    threading.Timer(0.1, left.send, ["late"]).start()
    assert right.receive() == "late"
    left.close()
    right.close()
