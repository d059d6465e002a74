"""The board and the channels, alone: what must hold whoever dies when."""

from __future__ import annotations

import fcntl
import os
import random
import select
import signal
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from libai_data.loader import board as board_module
from libai_data.loader.board import CAPACITY, Board, Entry
from libai_data.loader.event import Event
from libai_data.loader.timing import StageTimes
from libai_data.mesh.peers.channel import Channel
from tests.loader.streams import descriptors, eventually


def entry(number: int) -> Entry:
    return Entry(number, 1, 2, 3, 4)


TOOK = StageTimes(1.5, 0.25, 0.125, 8.0, 7)


def test_tasks_are_taken_in_the_order_in_which_they_were_put() -> None:
    board = Board(2)
    places = [board.put(entry(number)) for number in range(10)]
    assert places == list(range(10))
    taken = [board.take(number % 2) for number in range(10)]
    assert taken == [(number, entry(number)) for number in range(10)]
    assert board.take(0) is None
    assert board.claim(0)[0] == 8
    assert board.claim(1)[0] == 9
    board.close()


def test_the_board_goes_round_and_tells_when_it_is_full() -> None:
    board = Board(1)
    for number in range(CAPACITY + 100):
        board.put(entry(number))
        assert board.take(0) == (number, entry(number))
    for number in range(CAPACITY):
        board.put(entry(number))
    with pytest.raises(RuntimeError, match="lower prefetch"):
        board.put(entry(0))
    assert board.take(0) == (CAPACITY + 100, entry(0))
    board.close()


def test_what_is_done_is_known_with_what_it_took_until_its_place_is_used_again() -> None:
    board = Board(2)
    for turn in range(3):
        first, second = board.put(entry(1)), board.put(entry(2))
        board.take(1), board.take(0)
        assert not board.is_done(first) and not board.is_done(second)
        assert board.take(1, done=TOOK) is None
        assert board.is_done(first) and not board.is_done(second)
        assert board.times(first) == TOOK
        board.take(0, done=TOOK)
        for _ in range(CAPACITY - 2):
            board.put(entry(turn))
            board.take(0)
    board.close()


def is_set(event: Event) -> bool:
    waiting = select.poll()
    waiting.register(event.fileno(), select.POLLIN)
    return bool(waiting.poll(0))


def test_one_sleeping_worker_is_woken_for_each_task_and_none_that_is_awake() -> None:
    board = Board(3)
    assert board.take(2) is None and board.take(1) is None
    board.put(entry(0))
    assert [is_set(board.waker(worker)) for worker in range(3)] == [False, True, False]
    board.put(entry(1))
    assert [is_set(board.waker(worker)) for worker in range(3)] == [False, True, True]
    for worker in (1, 2):
        board.waker(worker).clear()
        assert board.take(worker) is not None
    board.put(entry(2))
    assert not any(is_set(board.waker(worker)) for worker in range(3))
    board.close()


def test_where_tasks_cost_little_another_worker_is_woken_only_for_many_or_for_one_that_has_waited_long(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(board_module, "_LONG", 10**12)
    board = Board(2)
    board.take(1)
    for number in range(3):
        board.put(entry(number), may_wait=3)
        assert not is_set(board.waker(1)), "worker 0 is awake, and can do three tasks by itself"
    board.put(entry(3), may_wait=3)
    assert is_set(board.waker(1))
    board.waker(1).clear()
    assert [board.take(1) is not None for _ in range(5)] == [True] * 4 + [False]

    assert board.take(0) is None
    board.put(entry(0), may_wait=3)
    assert is_set(board.waker(0)), "all slept"
    monkeypatch.setattr(board_module, "_LONG", 0)
    board.put(entry(1), may_wait=3)
    assert is_set(board.waker(1)), "worker 0 has left a task waiting for long"
    board.close()


def test_help_is_called_only_while_tasks_wait() -> None:
    board = Board(2)
    assert board.take(1) is None
    board.wake()
    assert not is_set(board.waker(1)) and board.seconds_awake(1) == 0
    board.put(entry(0), may_wait=9)
    board.wake()
    assert is_set(board.waker(1)) and board.seconds_awake(1) < 30
    board.close()


def test_the_trainer_is_woken_by_the_task_that_it_waits_for_alone() -> None:
    board = Board(1)
    first, second, third = (board.put(entry(number)) for number in range(3))
    board.take(0)
    board.take(0, done=TOOK)
    assert not is_set(board.event)
    assert not board.trainer_waits(first)
    assert board.trainer_waits(third)
    board.take(0, done=TOOK)
    assert board.is_done(second) and not is_set(board.event)
    board.take(0, done=TOOK)
    assert is_set(board.event)
    board.close()


def test_what_waits_and_what_is_claimed_are_told_apart() -> None:
    board = Board(1)
    assert board.oldest_waiting() is None
    assert board.claim(0) == (None, 0.0)
    first, second = board.put(entry(0)), board.put(entry(1))
    assert board.oldest_waiting() == first
    board.take(0)
    assert (board.is_waiting(first), board.is_waiting(second)) == (False, True)
    assert board.oldest_waiting() == second
    place, seconds = board.claim(0)
    assert place == first
    assert 0 <= seconds < 30
    board.clear_claim(0)
    assert board.claim(0) == (None, 0.0)
    board.close()


def test_processes_that_are_killed_at_any_moment_lose_no_task_but_the_one_they_claim() -> None:
    """Takers report what they take; what a killed one had claimed and not reported is put again, as loaders do."""
    board = Board(3)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    chance = random.Random()
    number_at: dict[int, int] = {}
    reported: list[int] = []

    def take_for_ever(worker: int) -> int:
        pid = os.fork()
        while pid == 0:
            found = board.take(worker)
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
                number_at[board.put(entry(number))] = number
                number += 1
            victim = chance.randrange(3)
            os.kill(takers[victim], signal.SIGKILL)
            os.waitpid(takers[victim], 0)
            all_are_reported()
            place, _ = board.claim(victim)
            board.clear_claim(victim)
            if place is not None and not board.is_waiting(place) and number_at[place] not in reported:
                number_at[board.put(entry(number_at[place]))] = number_at[place]
            takers[victim] = take_for_ever(victim)
        assert eventually(all_are_reported)
        assert len(reported) == number
    finally:
        for pid in takers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
        board.close()


def test_a_process_that_is_stopped_with_the_lock_in_its_hands_does_not_stop_the_trainer(monkeypatch: Any) -> None:
    monkeypatch.setattr(board_module, "_SECONDS_TO_HOLD", 0.2)
    board = Board(1)
    holder = os.fork()
    if holder == 0:
        fcntl.lockf(board.descriptors[0], fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(holder, os.WUNTRACED)
    place = board.put(entry(0))
    assert os.WTERMSIG(os.waitpid(holder, 0)[1]) == signal.SIGKILL
    assert board.take(0) == (place, entry(0))
    board.close()


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
    assert descriptors() == before


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
