"""Reading ahead: a thread iterates over an iterable while the trainer computes."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Callable, Optional

from libai_data.data.fork_lock import end_if_fork_of
from libai_data.data.items import ReuseCheck
from libai_data.data.random.drawing_streams import (
    LONGEST_WAIT,
    forget_drawing_stream,
    note_drawing_stream,
    wait_for_stream,
)
from libai_data.data.random.generator_states import Watched, watched
from libai_data.data.random.global_generators import warn_once
from libai_data.errors import PassError, SampleError, error_text
from libai_data.iterables.shared_use import SaveState
from libai_data.loader.daemon_thread import DaemonThread
from libai_data.loader.executor import Stuck
from libai_data.loader.iteration import LOADER_CLOSED
from libai_data.loader.resumable import finish

_POLL_SECONDS = 0.2  # how long the thread or the trainer waits before it checks whether to stop
_END_SECONDS = 5.0

Open = Callable[[], tuple[Iterator[Any], Optional[SaveState]]]


@dataclass(frozen=True)
class Group:
    """Some consecutive items of an iterable."""

    items: list[Any]  # samples or batches, in order; fewer than asked for at the end
    state: str | None = None  # state of the iterable after these items, as JSON text; None if it has no state
    is_last: bool = False
    error: BaseException | None = None  # what the iterable raised instead of the next item


class Flag:
    """Is set once, by any thread. A `threading.Event` has a lock, which a Ctrl-C can leave locked."""

    is_set = False


class _Shared:
    """What thread and trainer share. It has no reference to the `Prefetcher`, so Python can free the prefetcher."""

    def __init__(self, ahead: int, closed: Flag) -> None:
        # Not a `queue.Queue`: a Ctrl-C at the wrong moment leaves its lock locked for ever.
        self.groups: queue.SimpleQueue[Group] = queue.SimpleQueue()
        self.free_places: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(ahead):
            self.free_places.put(None)
        self.is_stopped, self.closed = False, closed
        self.items = 0
        self.turn = threading.RLock()
        """The thread holds it while it reads an item; see `streams_stopped`."""
        self.waits = 1
        """Is odd while the trainer waits, and so does not draw: until it has the first group, and in later waits."""

    @property
    def is_over(self) -> bool:
        return self.is_stopped or self.closed.is_set

    def put(self, group: Group) -> None:
        while not self.is_over:
            with suppress(queue.Empty):
                self.free_places.get(timeout=_POLL_SECONDS)
                self.groups.put(group)
                return


class Prefetcher:
    """Reads one epoch of an iterable in a thread, at most `ahead` groups. Only this thread uses the iterable.

    After `timeout` seconds without an item, the iterable counts as hung; 0 waits forever. Another thread may set
    `closed` at any time: what is read from then on is discarded, and its end is not that of the epoch. With
    `draws_in_torch`, the iterable may use torch's generator: each epoch of a torch DataLoader draws a seed from it.
    """

    def __init__(
        self,
        open_round: Open,
        size: int,
        ahead: int,
        name: str,
        timeout: float,
        closed: Flag,
        draws_in_torch: bool = False,
    ) -> None:
        self._shared = _Shared(ahead, closed)
        self._name = name
        self._timeout = timeout
        arguments = self._shared, open_round, size, name, draws_in_torch
        thread = DaemonThread(_run, arguments, f"reads {name} ahead")
        self._thread = thread
        # Also runs at exit: if a thread is left, OneFlow does not wait for the other ranks, and the other ranks abort.
        self._stop = weakref.finalize(self, _end, self._shared, thread)
        thread.start()

    def next_group(self) -> Group:
        """Wait for the next group; a PassError if another thread closed the loader, SampleError if reading fails."""
        shared = self._shared
        wait_for_stream(shared.turn)
        shared.waits |= 1
        try:
            group = self._waited_for()
        finally:
            shared.waits += 1
        if group.error is not None:
            kind, _, message = error_text(group.error).partition(": ")
            raise SampleError(
                f"{self._name} raised {kind} after {self._shared.items} item(s) of this epoch: {message}"
            ) from group.error
        return group

    def _waited_for(self) -> Group:
        shared = self._shared
        stuck = Stuck(1)
        while True:
            try:
                group = shared.groups.get(timeout=_POLL_SECONDS)
                shared.free_places.put(None)
                return group
            except queue.Empty:
                if shared.is_over:
                    raise PassError(LOADER_CLOSED) from None
                stuck.look()
                if self._timeout and stuck.seconds(0, items := shared.items) > self._timeout:
                    raise SampleError(
                        f"{self._name} has yielded nothing for {self._timeout:g} s, after {items} item(s) of this "
                        "epoch; check what it waits for, or raise timeout"
                    ) from None

    def close(self) -> None:
        """End the thread. A thread that hangs in the iterable is left, and ends with the process."""
        finish(self._stop)


def _end(shared: _Shared, thread: threading.Thread) -> None:
    shared.is_stopped = True
    shared.free_places.put(None)  # The thread may wait for a place.
    with suppress(RuntimeError):  # An interrupt came before the thread started, or the thread's garbage collector.
        thread.join(_END_SECONDS)


def warn_of_draws(name: str, generators: Watched, marks: Any, draws_in_torch: bool) -> list[str]:
    """Warn once if an iterable has moved global random generators since they had these marks; see `Prefetcher`.

    Returns:
        The names of these generators.
    """
    moved = zip(generators.generators, generators.moved(marks, generators.marks()))
    drawn = [each.name for each, has_moved in moved if has_moved]
    told = [each for each in drawn if not (draws_in_torch and each == "torch")]
    if told:
        warn_once(
            "%s draws from %s, which the whole program shares. So its rows may differ in the next run and on other "
            "ranks, and a resume may fail. Make a generator of the epoch (and shard) within the iterable, such as "
            "numpy.random.default_rng(epoch)",
            name,
            " and ".join(told),
        )
    return drawn


def _run(shared: _Shared, open_round: Open, size: int, name: str, draws_in_torch: bool) -> None:
    process, waits, turn = os.getpid(), shared.waits, shared.turn
    generators = watched()
    marks = generators.marks()
    try:
        if shared.is_over:
            return
        iterator, save = open_round()
        ended, reuse = False, ReuseCheck("the iterable")
        while not ended and not shared.is_over:
            items: list[Any] = []
            while len(items) < size and not shared.is_over:
                has_turn = turn.acquire(timeout=LONGEST_WAIT)
                try:
                    item = next(iterator)
                    end_if_fork_of(process)
                except StopIteration:
                    ended = True
                    break
                finally:
                    if has_turn:
                        turn.release()
                if waits & 1 and generators.marks() != marks and shared.waits == waits:
                    drawn = warn_of_draws(name, generators, marks, draws_in_torch)
                    # A seed of the epoch is drawn once, until the first item comes.
                    if drawn != ["torch"] or shared.items or not draws_in_torch:
                        note_drawing_stream(turn)
                reuse.see(item)
                items.append(item)
                shared.items += 1
                # The first item, the second, the fourth, and so on, to save time.
                waits = 0 if shared.items & (shared.items - 1) else shared.waits
                if waits & 1:
                    marks = generators.marks()
            shared.put(Group(items, save() if save is not None else None, ended))
    except BaseException as error:
        shared.put(Group([], error=error))
    finally:
        forget_drawing_stream()
