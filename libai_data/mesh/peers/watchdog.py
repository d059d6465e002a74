"""Watches the other ranks while a program runs, by connections between the ranks.

The ranks are connected by `rank_links`. A thread watches the connections:

* If a connection closes without a farewell, its rank has died or failed.
* A rank whose program ends sends a farewell, with the number of collectives of this package that it has begun
  (`to_global`, `synchronize`, ...). If all ranks have the same number, this is the regular end. If a rank begins one
  more collective, it needs a rank that has left.
* The other ranks may also wait for this rank in a collective of OneFlow, which is not counted. So after a farewell,
  each rank reports to rank 0 whether its main thread waits inside OneFlow. If all ranks wait for long enough, none can
  continue.
* Before any rank leaves, each rank that waits reports to rank 0 where it waits, and `standstill` decides whether to
  end.
* Each collective of this package begins with a meeting over these connections, in which the ranks compare the names of
  their collectives. So two different collectives never mix; OneFlow would abort, or compute wrong sums. They also
  compare which batch they used last. Ranks of one node compare each batch when they use it (`batch_notes`).

In each case all ranks get the reason and end at once. Over the same connections the ranks agree where to stop
(`stop_agreement`).
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Callable, NoReturn, cast

from libai_data.errors import ContractError, MeshError, PeerError, by_rank
from libai_data.mesh.peers.batch_notes import BatchPlace, different_batches
from libai_data.mesh.peers.links import Word, receive_word, send_word
from libai_data.mesh.peers.main_thread import SECONDS_TO_WAIT, MainThread
from libai_data.mesh.peers.rank_links import RankLinks
from libai_data.mesh.peers.standstill import (
    COLLECTIVE,
    FIRST_MEETING,
    SAME_COLLECTIVES,
    SECONDS_BETWEEN_REPORTS,
    Leaving,
    OwnPlace,
    Place,
    Report,
    Standstill,
    in_words,
    line_of_program,
)
from libai_data.mesh.peers.stop_agreement import StopAgreement

SECONDS_FOR_THE_CAUSE = 2.0
"""Seconds that a rank waits before it ends because a peer is gone. If it fails itself, its own error explains more."""

_SECONDS_LATER_THAN_FOLLOWERS = 0.3
"""A rank that others connect to ends so much later, so that they print their message before OneFlow aborts them."""

_SECONDS_TO_FLUSH = 2.0
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_FOR_THREADS = 10.0
"""After its program has ended, a rank that threads keep alive counts as gone. Python calls `atexit` functions later."""

_LEFT, _WAITS, _PLACE, _AT, _RELEASE, _STOP, _END = "left", "waits", "stands", "at", "go", "stop", "end"


class Liveness:
    """Watches the other ranks until this process ends."""

    def __init__(self, rank: int, world_size: int, num_nodes: int, has_gpus: bool = False) -> None:
        self._rank, self._world_size, self._nodes = rank, world_size, num_nodes
        # On the step before which all ranks stop.
        self.stop = StopAgreement(world_size, partial(self._tell_rank0, _STOP), partial(self._tell_all, _STOP))
        self._met = world_size == 1
        self._collectives = 0
        self._exit_asked: tuple[Any, int] = (None, 0)
        self._is_ending = False
        self._links = RankLinks(rank, world_size, num_nodes, self._farewells)
        # The main thread and the thread that watches share these; `RankLinks.changed` is held when they change.
        self._leaving = Leaving(world_size)
        self._wait = 0.0  # what this rank has reported last: seconds after which its wait counts, 0 if it does not wait
        self._is_at_meeting = False
        self._arrived: dict[int, tuple[Place, str, list[Any]]] = {}
        self._gathered: list[Any] = []
        self._main = MainThread(has_gpus)
        self._place = OwnPlace()
        self._report_at = 0.0
        self._kept_since = float("inf")  # when threads began to keep this process alive
        self._standstill = Standstill(world_size, num_nodes, has_gpus)
        self._last_batch: BatchPlace | None = None
        self._hear: dict[str, Callable[..., None]] = {
            _WAITS: self._leaving.note,
            _PLACE: self._note_place,
            _STOP: self.stop.hear,
        }
        if world_size > 1:
            self._main.check_visible()
            threading.Thread(target=self._watch, name="liveness of other ranks", daemon=True).start()

    def _farewells(self) -> list[Word]:
        """The words for a rank that connects after others have left."""
        return [(_LEFT, *farewell) for farewell in self._leaving.after.items()]

    def ask_to_stop(self) -> None:
        """Let all ranks stop before one of the next steps. A signal handler of the main thread may call this."""
        if self._world_size == 1:
            self.stop.ask()
        else:
            # The other thread sends: the main thread may hold the lock for sending, or be in the middle of a message.
            self._links.call(b"s")

    def waiting(self, kind: str, what: str) -> AbstractContextManager[None]:
        """Wraps code of the main thread that may wait for other ranks. `kind` is `COLLECTIVE` or `BATCH`."""
        return self._place.at((self._collectives, kind, what))

    def begin_collective(self, what: str = "", words: str = "") -> dict[int, str]:
        """Record that this rank begins a collective, which needs all ranks.

        Args:
            what: wait until all ranks have begun a collective of this name; "" does not wait.
            words: what this rank then sends to all ranks.

        Returns:
            The `words` of each rank; empty if `what` is "".

        Raises:
            PeerError: A rank has left.
            MeshError: This is not the main thread. Or, in the first collective, as `meet`.
            ContractError: The last batches that the ranks used differ; raised on all ranks, if `what` is not "".
        """
        if self._world_size == 1:
            return {}
        if threading.current_thread() is not threading.main_thread():
            raise MeshError(
                f"{what or 'a collective'} was begun in the thread '{threading.current_thread().name}', but the main "
                "thread may begin another one meanwhile, and the ranks would mix the two. If a thread reads batches of "
                "an iterable ahead, let rank 0 read for all (readers='rank0'), or read on the main thread"
            )
        if not self._met:
            with self.waiting(COLLECTIVE, FIRST_MEETING):
                self.meet()
        with self._links.changed:
            self._collectives += 1
            self._is_at_meeting, self._gathered = bool(what), []
            problem = self._leaving.problem_of(self._rank, self._collectives, self._is_at_meeting)
        if problem:
            self._links.send_to_all(_END, problem)
            raise PeerError(problem)
        if not what:
            return {}
        with self.waiting(COLLECTIVE, what):
            own = [self._rank, words, None if self._last_batch is None else [*map(int, self._last_batch)]]
            self._arrive(self._rank, (self._collectives, COLLECTIVE, what), line_of_program(), [own])
            with self._links.changed:
                self._links.changed.wait_for(lambda: self._gathered)
        batches = {each: None if batch is None else tuple(batch) for each, _, batch in self._gathered}
        if len(set(batches.values())) > 1:
            self._last_batch = None
            raise ContractError(different_batches(batches))
        return {each: told for each, told, _ in self._gathered}

    def note_batch(self, place: BatchPlace) -> None:
        """Compare the batch of the newest collective with those of the neighbours; a ContractError if they differ."""
        # Without the digest of the fields, because `check_contract` compares all fields, and names those that differ.
        self._last_batch = (*place[:-1], 0)
        if self._links.notes is not None and (other := self._links.notes.note(self._collectives, place)) is not None:
            theirs = self._links.notes.place_of(other, self._collectives)
            raise ContractError(different_batches({self._rank: place, self._links.leader + other: theirs}))

    def _arrive(self, rank: int, place: Place, line: str, gathered: list[Any]) -> None:
        """Record the place that a rank and all ranks below it have reached. After the last one, all can continue."""
        with self._links.changed:
            self._arrived[rank] = cast(Place, tuple(place)), line, gathered
            # Not the number of connections: this rank may still wait for some connections.
            if len(self._arrived) <= len(self._links.followers) + (self._nodes - 1 if self._rank == 0 else 0):
                return
            arrived, self._arrived = self._arrived, {}
        if len({place for place, _, _ in arrived.values()}) > 1:
            places = by_rank({each: in_words(place, at) for each, (place, at, _) in sorted(arrived.items())})
            self._end(f"the ranks have begun different collectives: {places}. {SAME_COLLECTIVES}")
        gathered = [each for _, _, below in arrived.values() for each in below]
        if self._links.above is None:
            self._release(json.dumps(gathered))
        else:
            send_word(self._links.above, _AT, self._rank, place, line, gathered)

    def _release(self, gathered: str) -> None:
        """Let this rank and those below continue: all ranks have arrived, and have sent these words."""
        # In this order: a rank below may leave the job at once, and this rank's next words must arrive after these.
        self._is_at_meeting = False
        for connection in self._links.below():
            send_word(connection, _RELEASE, gathered)
        with self._links.changed:
            self._gathered = json.loads(gathered)
            self._links.changed.notify_all()

    def meet(self) -> None:
        """Compare job and machine with rank 0, and complete the connections. The first call is collective."""
        if not self._met:
            self._met = True
            self._links.meet()

    def _tell_rank0(self, *word: Any) -> None:
        """Send a word of this rank, or of a rank below, to rank 0, which handles it."""
        if self._rank == 0:
            kind, *content = word
            self._hear[kind](*content)
        elif self._links.above is not None:
            send_word(self._links.above, *word)

    def _tell_all(self, kind: str, *content: Any) -> None:
        """Send a word of rank 0 to the ranks below, and handle it."""
        for connection in self._links.below():
            send_word(connection, kind, *content)
        self._hear[kind](*content)

    def _watch(self) -> None:
        events = select.poll()
        events.register(self._links.calls, select.POLLIN)
        try:
            listener = self._links.open_to_node()
        except PeerError as error:
            self._end(str(error))
        if listener is not None:
            events.register(listener, select.POLLIN)
        watched: set[int] = set()
        # Also after this rank's own farewell: OneFlow's shutdown waits for the others, and would wait for a dead rank.
        while True:
            for descriptor in set(self._links.connections) - watched:
                events.register(descriptor, select.POLLIN)
                watched.add(descriptor)
            for descriptor, _ in events.poll(
                1000 * (_SECONDS_BETWEEN_LOOKS if self._leaving.after else SECONDS_BETWEEN_REPORTS)
            ):
                if descriptor == self._links.calls:
                    if b"s" in os.read(self._links.calls, 64):
                        self.stop.ask()
                elif listener is not None and descriptor == listener.fileno():
                    self._links.accept(listener)
                elif not self._handle(descriptor):
                    events.unregister(descriptor)
            self._leave_if_kept_by_threads()
            if self._leaving.after:
                self._report_wait()
            else:
                self._report_place()

    def _leave_if_kept_by_threads(self) -> None:
        """Say farewell if the program has ended, but its threads go on: other ranks may wait for this rank."""
        if self._rank in self._leaving.after or not self._main.waits_for_threads():
            return
        self._kept_since = min(self._kept_since, time.monotonic())
        if time.monotonic() - self._kept_since > _SECONDS_FOR_THREADS:
            kept_by = [each for each in threading.enumerate() if not each.daemon]
            threads = [each.name for each in kept_by if each is not threading.main_thread()]
            words = f"rank {self._rank} has ended its program, but its threads go on: {', '.join(threads)}\n"
            with suppress(OSError):
                os.write(2, words.encode())
            self.farewell()

    def _handle(self, descriptor: int) -> bool:
        """Handle a word; returns False if no more words will arrive over this connection."""
        connection = self._links.connections[descriptor]
        word = receive_word(connection)
        if not word:
            name = self._links.name_of(descriptor)
            rank = int(name.split()[1].rstrip(","))
            if rank not in self._leaving.after:
                self._end(f"{name} is gone; see its output", received_from=descriptor)
            self._tell_rank0(_WAITS, rank, SECONDS_TO_WAIT)
            return False
        kind, *content = word
        if kind == _END:
            self._end(content[0], descriptor)
        elif kind == _LEFT:
            rank, collectives = content
            with self._links.changed:
                self._leaving.after[rank] = collectives
                problem = self._leaving.problem_of(self._rank, self._collectives, self._is_at_meeting)
            self._links.send_to_all(*word, but=descriptor)
            if problem:
                self._end(problem)
        elif kind == _AT:
            self._arrive(*content)
        elif kind == _RELEASE:
            self._release(*content)
        elif connection is self._links.above:
            self._tell_all(*word)
        else:
            self._tell_rank0(*word)
        return True

    def _report_wait(self) -> None:
        """After a rank has left, report whether this rank waits; rank 0 ends the job if no rank can continue."""
        seconds = self._main.seconds_to_wait(has_left=self._rank in self._leaving.after)
        if seconds != self._wait:
            self._wait = seconds
            self._tell_rank0(_WAITS, self._rank, seconds)
        problem = self._leaving.verdict() if self._rank == 0 else ""
        if problem:
            self._end(problem)

    def _report_place(self) -> None:
        """Report where this rank waits; rank 0 ends the job if all ranks wait forever."""
        now = time.monotonic()
        if now < self._report_at:
            return
        self._report_at = now + 0.9 * SECONDS_BETWEEN_REPORTS
        self._main.seconds_to_wait(has_left=False)
        report = self._place.report(now, self._collectives, self._main.is_in_oneflow, self._main.is_idle)
        if report is not None:
            self._tell_rank0(_PLACE, self._rank, *report)
        problem = self._standstill.verdict(now) if self._rank == 0 else ""
        if problem:
            self._end(problem)

    def _note_place(self, rank: int, place: Sequence[Any], *others: Any) -> None:
        self._standstill.note(rank, Report(cast(Place, tuple(place)), *others), time.monotonic())

    def _end(self, why: str, received_from: int = -1) -> None:
        """End all ranks. The thread that watches calls this, or the main thread at its end."""
        self._is_ending = True
        self._links.send_to_all(_END, why, but=received_from)
        leads, has_left = len(self._links.connections) > 1, self._rank in self._leaving.after
        # After its farewell, this rank cannot fail itself, and its main thread soon ends the process with code 0.
        seconds = 0.0 if has_left else SECONDS_FOR_THE_CAUSE
        seconds += _SECONDS_LATER_THAN_FOLLOWERS if leads else 0.0
        # Ends the process even if the output is blocked (Ctrl-S), and with it this thread or the main thread.
        timer = threading.Timer(seconds + _SECONDS_TO_FLUSH, os._exit, (1,))
        timer.daemon = True
        timer.start()
        # Written before the wait, and without locks: OneFlow aborts the process when its own connection breaks.
        with suppress(OSError):
            os.write(2, f"rank {self._rank} ends: {why}\n".encode())
        time.sleep(seconds)
        end_process(1)

    def note_exit(self, code: Any) -> None:
        """Record that this rank now calls `sys.exit`."""
        self._exit_asked = code, self._collectives

    def farewell(self) -> None:
        """Send the other ranks the message that this rank ends, and after how many collectives."""
        if self._world_size == 1:
            return
        code, collectives = self._exit_asked
        # If collectives followed, the program has caught the SystemExit.
        if code not in (None, 0) and collectives == self._collectives:
            end_process(code if isinstance(code, int) else 1, f"rank {self._rank} ends: it called sys.exit({code!r})")
        uncaught = getattr(sys, "last_value", None)
        if uncaught is not None:
            # Another exception handler has already printed the exception.
            end_after(uncaught, self._rank)
        while self._is_ending:
            # The thread that watches ends this process with code 1; the main thread would end it with code 0.
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        with self._links.changed:
            if self._rank in self._leaving.after:
                return
            self._leaving.after[self._rank] = self._collectives
            problems = [self._leaving.problem_of(*each, False) for each in self._leaving.after.items()]
        self._links.send_to_all(_LEFT, self._rank, self._collectives)
        self._links.call(b"c")
        if any(problems):
            # The ranks that have left have not all begun the same number of collectives.
            self._end(next(filter(None, problems)))


def end_after(error: BaseException, rank: int) -> NoReturn:
    """End this process after an uncaught exception that was already printed."""
    if isinstance(error, KeyboardInterrupt):
        end_process(128 + signal.SIGINT, f"rank {rank} was interrupted")
    if isinstance(error, PeerError):
        time.sleep(SECONDS_FOR_THE_CAUSE)  # The rank that has failed must end first: the launcher names the first one.
    # A PeerError has the same words as the message of the thread that watches, whichever of the two comes first.
    end_process(1, f"rank {rank} ends: {error if isinstance(error, PeerError) else 'see the exception above'}")


def end_process(code: int, message: str = "") -> NoReturn:
    """Write `message` to stderr and end this process, without any cleanup that could wait for other ranks."""
    try:
        with suppress(Exception):  # raised by a handler of the user's own
            logging.shutdown()
        for stream, text in ((sys.stdout, ""), (sys.stderr, f"{message}\n" if message else "")):
            with suppress(Exception):  # The stream is closed, full or missing.
                stream.write(text)
                stream.flush()
    finally:
        os._exit(code)
