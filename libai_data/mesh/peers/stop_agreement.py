"""All ranks stop before the same step, although a signal may have reached only one of them.

Ranks may be some steps apart, because OneFlow computes in the background. A rank within a step may need the other ranks
to reach this step too, so no rank may wait within a step. The rank that got the signal asks rank 0, and rank 0 asks all
ranks for their step. A thread of each rank answers with the step of its main thread, and stops the main thread before
its next step until rank 0 has decided. Rank 0 chooses the largest step plus one: no rank has begun it, and all can
reach it. Without a signal, the ranks exchange nothing.
"""

from __future__ import annotations

import threading
from typing import Callable

_ASKED, _WHERE, _IN, _BEFORE = "asked", "where", "in", "before"

Send = Callable[[str, int], None]
"""Sends a word and a step, which `hear` of the receiving rank is called with; rank 0 also sends to itself."""


class StopAgreement:
    """One rank's part in it. The main thread calls `reaches`; the thread that receives words calls `ask` and `hear`."""

    def __init__(self, world_size: int, to_rank0: Send, to_all: Send) -> None:
        self._world_size = world_size
        self._to_rank0, self._to_all = to_rank0, to_all
        self._changed = threading.Condition()
        self._step = -1
        self._held = False
        self._stop_before: int | None = None
        # On rank 0: whether a rank has asked, and the steps of the ranks that have answered.
        self._asked = False
        self._steps: list[int] = []

    def begin(self, start_iter: int) -> None:
        """Record that a training begins with step `start_iter`.

        In a job of one rank, requests to an earlier training of this process are forgotten.
        """
        with self._changed:
            self._step = start_iter - 1
            if self._world_size == 1:
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
        self._to_rank0(_ASKED, 0)

    def hear(self, word: str, step: int) -> None:
        """Handle a word that a rank sent to rank 0, or that rank 0 sent to all ranks."""
        if word == _ASKED and not self._asked:
            self._asked = True
            self._to_all(_WHERE, 0)
        elif word == _WHERE:
            with self._changed:
                self._held = True
                own = self._step
            self._to_rank0(_IN, own)
        elif word == _IN:
            self._steps.append(step)
            if len(self._steps) == self._world_size:
                self._to_all(_BEFORE, max(self._steps) + 1)
        elif word == _BEFORE:
            with self._changed:
                self._stop_before = step
                self._changed.notify_all()
