"""The task queue and the channels, alone: what must hold whoever dies when."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import threading
from typing import Any

import pytest

from libai_data.loader import task_queue as queue_module
from libai_data.loader.stage_times import StageTimes
from libai_data.loader.task_queue import Entry, TaskQueue, WorkerTasks
from libai_data.mesh.peers.channel import Channel
from tests.deadline import wait_until
from tests.loader.streams import descriptors

TOOK = StageTimes(1.5, 0.25, 0.125, 8.0, 7)


def entry(number: int) -> Entry:
    return Entry(number, 1, 2, 3, 4)


class Queue(TaskQueue):
    """A task queue with the workers' side of it."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.of = [self.as_worker(worker) for worker in range(workers)]

    def as_worker(self, worker: int) -> WorkerTasks:
        tasks, done, claims = self.descriptors
        return WorkerTasks(worker, tasks, done, os.dup(claims))

    def taken_by(self, worker: int) -> int | None:
        """The number with which the task was put that a worker takes."""
        taken = self.of[worker].take()
        return None if taken is None else taken.offset


@pytest.fixture()
def make_queue() -> Any:
    queues: list[Queue] = []

    def make(workers: int) -> Queue:
        queues.append(Queue(workers))
        return queues[-1]

    yield make
    for task_queue in queues:
        task_queue.close()


def test_tasks_are_taken_in_the_order_in_which_they_were_put(make_queue: Any) -> None:
    task_queue = make_queue(2)
    places = [task_queue.put(entry(number)) for number in range(10)]
    assert places == list(range(1, 11))
    taken = [task_queue.of[number % 2].take() for number in range(10)]
    assert [found[:-1] for found in taken] == [entry(number)[:-1] for number in range(10)]
    assert [found.place for found in taken] == places
    assert task_queue.of[0].take() is None
    assert task_queue.claim(0) == 9
    assert task_queue.claim(1) == 10


def test_more_tasks_may_wait_than_the_pipe_has_room_for(make_queue: Any) -> None:
    task_queue = make_queue(1)
    for number in range(5000):
        task_queue.put(entry(number))
    found: list[Any] = []
    while len(found) < 5000:
        taken = task_queue.taken_by(0)
        if taken is None:  # The next results let the trainer put more.
            task_queue.of[0].report(len(found), TOOK)
            assert task_queue.take_done() == [(len(found), TOOK)]
        else:
            found.append(taken)
    assert found == list(range(5000))
    for number in range(5000):
        task_queue.put(entry(number))
    assert task_queue.taken_by(0) == 0
    assert task_queue.drop_waiting() == list(range(5002, 10_001))
    assert task_queue.taken_by(0) is None and task_queue.drop_waiting() == []


def test_what_is_done_is_known_once_with_what_it_took(make_queue: Any) -> None:
    task_queue = make_queue(2)
    first, second = task_queue.put(entry(1)), task_queue.put(entry(2))
    task_queue.of[1].take(), task_queue.of[0].take()
    assert task_queue.take_done() == []
    task_queue.of[0].report(second, TOOK)
    assert task_queue.take_done() == [(second, TOOK)]
    task_queue.of[1].report(first, StageTimes())
    task_queue.of[0].report(7, TOOK)
    assert task_queue.take_done() == [(first, StageTimes()), (7, TOOK)]
    assert task_queue.take_done() == []


def test_one_sleeping_worker_is_woken_for_each_task_and_none_that_is_awake(make_queue: Any) -> None:
    task_queue = make_queue(4)
    task_queue.of[3].note_asleep(True), task_queue.of[2].note_asleep(True)
    for number, woken in enumerate(([2], [3], [])):
        task_queue.put(entry(number))
        assert task_queue.to_wake(may_wait=0) == woken


def test_the_first_worker_is_woken_by_a_task_and_others_only_for_more(make_queue: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(queue_module, "_LONG", 10**3)
    task_queue = make_queue(2)
    waiting = select.poll()
    waiting.register(task_queue.of[0].fileno(), select.POLLIN)
    for worker in task_queue.of:
        worker.note_asleep(True)
    assert not waiting.poll(0)
    task_queue.put(entry(0))
    assert waiting.poll(0) and task_queue.to_wake(may_wait=0) == []
    task_queue.put(entry(1))
    assert task_queue.to_wake(may_wait=0) == [1]


def test_where_tasks_cost_little_another_worker_is_woken_only_for_many_or_for_one_that_has_waited_long(
    make_queue: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(queue_module, "_LONG", 10**3)
    task_queue = make_queue(2)
    task_queue.of[1].note_asleep(True)
    for number in range(3):
        task_queue.put(entry(number))
        assert task_queue.to_wake(may_wait=3) == [], "worker 0 is awake, and can do three tasks by itself"
    task_queue.put(entry(3))
    assert task_queue.to_wake(may_wait=3) == [1]
    assert [task_queue.taken_by(1) is not None for _ in range(5)] == [True] * 4 + [False]

    task_queue.of[1].note_asleep(True)
    task_queue.put(entry(0))
    assert task_queue.to_wake(may_wait=3) == []
    monkeypatch.setattr(queue_module, "_LONG", 0)
    task_queue.put(entry(1))
    assert task_queue.to_wake(may_wait=3) == [1], "worker 0 has left a task waiting for long"


def test_help_is_called_only_while_tasks_wait(make_queue: Any) -> None:
    task_queue = make_queue(2)
    task_queue.of[1].note_asleep(True)
    assert task_queue.all_to_wake() == [] and task_queue.sleepers() == [1]
    task_queue.put(entry(0))
    assert task_queue.all_to_wake() == [1] and task_queue.sleepers() == []


def test_what_waits_and_what_is_claimed_are_told_apart(make_queue: Any) -> None:
    task_queue = make_queue(1)
    assert task_queue.waiting() == 0
    assert task_queue.claim(0) is None
    first, _ = task_queue.put(entry(0)), task_queue.put(entry(1))
    assert task_queue.claim(0) is None
    assert task_queue.waiting() == 2
    task_queue.of[0].take()
    assert task_queue.waiting() == 1
    assert task_queue.claim(0) == first
    task_queue.clear_claim(0)
    assert task_queue.claim(0) is None


def test_processes_that_are_killed_at_any_moment_lose_no_task_but_the_one_they_claim(make_queue: Any) -> None:
    """Takers report what they take; what a killed one had claimed and not reported is put again, as loaders do."""
    task_queue = make_queue(3)
    chance = random.Random()
    number_at: dict[int, int] = {}
    reported: list[int] = []

    def take_for_ever(worker: int) -> int:
        pid = os.fork()
        if pid == 0:
            # As a worker, it maps the memory anew; in a fork, the maps of the parent are private.
            tasks = task_queue.as_worker(worker)
            while True:
                found = tasks.take()
                if found is not None:
                    tasks.report(found.place, TOOK)
        return pid

    def all_are_reported() -> bool:
        reported.extend(number_at[place] for place, _ in task_queue.take_done())
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
            place = task_queue.claim(victim)
            task_queue.clear_claim(victim)
            if place is not None and number_at[place] not in reported:
                number_at[task_queue.put(entry(number_at[place]))] = number_at[place]
            takers[victim] = take_for_ever(victim)
        wait_until(all_are_reported, "report of all tasks")
        assert len(reported) == number
    finally:
        for pid in takers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


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
