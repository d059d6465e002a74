"""All ranks stop before the same step, although a signal may have reached only one of them.

Ranks may be some steps apart, because OneFlow computes in the background. A rank within a step may need the other ranks
to reach this step too, so no rank may wait within a step. The rank that got the signal asks rank 0, and rank 0 asks all
ranks for their step. A thread of each rank answers with the step of its main thread, and stops the main thread before
its next step until rank 0 has decided. Rank 0 chooses the largest step plus one: no rank has begun it, and all can
reach it. Without a signal, the ranks exchange nothing.

The ranks form a tree. A rank exchanges messages that begin with "stop: " with the rank above it and those below it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Callable

PREFIX = "stop: "
_ASKED, _WHERE, _IN, _BEFORE = (PREFIX + word for word in ("asked", "where", "in ", "before "))

Send = Callable[[str], None]


class StopAgreement:
    """One rank's part in it. The main thread calls `reaches`; the thread that receives words calls `ask` and `hear`."""

    def __init__(self) -> None:
        self.connect(None, ())
        self._changed = threading.Condition()
        self._step = -1
        self._held = False
        self._stop_before: int | None = None
        self._asked = False
        self._steps: list[int] = []

    def connect(self, send_up: Send | None, send_down: Sequence[Send]) -> None:
        """Set the functions that send words to the rank above (None on rank 0) and to the ranks below."""
        self._send_up = send_up
        self._send_down = list(send_down)

    def begin(self, start_iter: int) -> None:
        """Record that a training begins with step `start_iter`.

        In a job of one rank, requests to an earlier training of this process are forgotten.
        """
        with self._changed:
            self._step = start_iter - 1
            if self._send_up is None and not self._send_down:
                self._held = self._asked = False
                self._stop_before = None
                self._steps.clear()

    def reaches(self, step: int) -> bool:
        """Whether to stop before `step`; if not, `step` counts as begun. Waits while the ranks agree where to stop."""
        with self._changed:
            while self._held and self._stop_before is None:
                self._changed.wait()
            if self._stop_before is not None and step >= self._stop_before:
                return True
            self._step = step
            return False

    def ask(self) -> None:
        """Begin the agreement, because this rank was asked to stop."""
        if self._asked:
            return
        self._asked = True
        if self._send_up is None:
            self._inquire()
        else:
            self._send_up(_ASKED)

    def hear(self, word: str) -> None:
        """Handle a word of the rank above or of a rank below."""
        if word == _ASKED:
            self.ask()
        elif word == _WHERE:
            self._inquire()
        elif word.startswith(_IN):
            self._gather(int(word[len(_IN) :]))
        elif word.startswith(_BEFORE):
            self._decide(int(word[len(_BEFORE) :]))

    def _inquire(self) -> None:
        for send in self._send_down:
            send(_WHERE)
        with self._changed:
            self._held = True
            step = self._step
        self._gather(step)

    def _gather(self, step: int) -> None:
        self._steps.append(step)
        if len(self._steps) <= len(self._send_down):
            return
        furthest = max(self._steps)
        if self._send_up is None:
            self._decide(furthest + 1)
        else:
            self._send_up(f"{_IN}{furthest}")

    def _decide(self, stop_before: int) -> None:
        for send in self._send_down:
            send(f"{_BEFORE}{stop_before}")
        with self._changed:
            self._stop_before = stop_before
            self._changed.notify_all()
