"""Detects that all ranks wait for each other in different places, or for a rank that has left, so none can continue.

Each rank knows where its main thread waits: in a collective of this package, for a batch that another rank reads, or in
OneFlow. A rank that computes, reads or writes does not wait. As long as one rank does not wait, there is no verdict.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Optional

from libai_data.errors import by_rank

SECONDS_BETWEEN_REPORTS = 2.0
_SECONDS_UNTIL_REPORTED = 4.0
_SECONDS_FRESH = 10.0  # older reports do not count: a suspended process sends none, and may continue later

# Seconds for which all ranks must wait to count as waiting forever, on one node and on several nodes:
_SECONDS_FOR_BATCHES = 30.0, 300.0  # if their places differ: a batch of another rank may still arrive;
_SECONDS_IDLE = 30.0, 300.0  # if their places differ, some wait in OneFlow, and no process computes;
_SECONDS_AT_ONE_PLACE = 300.0, float("inf")  # if all wait at the same place, and no process computes.

COLLECTIVE, BATCH, ONEFLOW = "collective", "batch", "oneflow"
FIRST_MEETING = "the first meeting of all ranks"

SAME_COLLECTIVES = (
    "Every rank must run the same collectives in the same order (to_global, synchronize, making and iterating over "
    "loaders, with the same read mode and check_every)"
)
_REMEDY = (
    "every rank must use the same batches and steps, and end after them (a rank that breaks out of its loop, returns "
    "or calls sys.exit early leaves the others waiting)"
)


Place = tuple[int, str, str]
"""Number of collectives of this package that the rank has begun, kind of the place, and what the rank waits for."""


class Report(NamedTuple):
    """Where a rank waits."""

    place: Place  # compared between ranks
    line: str  # of the user's program
    seconds: float  # for which the rank has waited
    is_idle: bool  # its process computes nothing

    def in_words(self) -> str:
        """The report in words for an error message."""
        return in_words(self.place, self.line)


def in_words(place: Place, line: str) -> str:
    """A place, and the line of the program that waits there, in words for an error message."""
    number, kind, what = place
    where = f"{what}, its collective number {number}" if kind == COLLECTIVE else f"{what}, after {number} collectives"
    return where + (f" ({line})" if line else "")


class OwnPlace:
    """Where this rank waits. The main thread enters `at`, and the watchdog's thread calls `report`."""

    def __init__(self) -> None:
        self._place: Optional[Place] = None
        self._seen: Optional[Place] = None
        self._since = 0.0

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Record that the main thread waits at `place` within the block."""
        before, self._place = self._place, place
        try:
            yield
        finally:
            self._place = before

    def report(self, now: float, begun: int, in_oneflow: bool, is_idle: bool) -> Report | None:
        """Where the main thread waits; None if it does not wait, or has waited only for a short time.

        `begun` collectives of this package have begun; `in_oneflow` and `is_idle` are those of `MainThread`.
        """
        place = self._place
        if place is None and in_oneflow:
            # The same object as long as the thread waits there, because objects are compared below.
            place = self._seen if self._seen and self._seen[:2] == (begun, ONEFLOW) else None
            place = place or (begun, ONEFLOW, "in OneFlow")
        if place is not self._seen:
            self._seen, self._since = place, now
        if place is None or now - self._since < _SECONDS_UNTIL_REPORTED:
            return None
        return Report(place, line_of_program(), now - self._since, is_idle)


def line_of_program() -> str:
    """The line of the user's program that the main thread runs, as "train.py:12"; "" if there is none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
    libraries = os.path.dirname(os.__file__) + os.sep
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((package, libraries, "<")) and f"{os.sep}site-packages{os.sep}" not in file:
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Standstill:
    """Rank 0's view of where all ranks wait."""

    def __init__(self, world_size: int, num_nodes: int, has_gpus: bool) -> None:
        self._world_size = world_size
        self._across_nodes = num_nodes > 1
        self._has_gpus = has_gpus
        self._reports: dict[int, tuple[float, Report]] = {}

    def note(self, rank: int, report: Report, now: float) -> None:
        """Record the report of a rank, which arrived at time `now`."""
        self._reports[rank] = now, report

    def verdict(self, now: float) -> str:
        """Why no rank will ever continue; "" if one may."""
        reports = {rank: report for rank, (at, report) in sorted(self._reports.items()) if now - at < _SECONDS_FRESH}
        if len(reports) < self._world_size:
            return ""
        if min(report.seconds for report in reports.values()) < self._seconds(list(reports.values())):
            return ""
        places = by_rank({rank: report.in_words() for rank, report in reports.items()})
        return f"all ranks wait, and none can continue: {places}. {SAME_COLLECTIVES}"

    def _seconds(self, reports: list[Report]) -> float:
        kinds = {report.place[1] for report in reports}
        differ = len({report.place for report in reports}) > 1
        if differ and ONEFLOW not in kinds:
            # If a rank has completed a collective, all others have begun it, so they complete it soon.
            return _SECONDS_FOR_BATCHES[self._across_nodes]
        if not all(report.is_idle for report in reports):
            return float("inf")
        return (_SECONDS_IDLE if differ else _SECONDS_AT_ONE_PLACE)[self._across_nodes or self._has_gpus]


class Leaving:
    """What one rank knows of ranks that have left. `after`: the number of collectives that each of them had begun."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.after: dict[int, int] = {}
        self._waiting: dict[int, float] = {}
        self._all_wait_since = float("inf")

    def problem_of(self, rank: int, collectives: int, is_at_meeting: bool) -> str:
        """Why the collective that a rank has begun cannot complete; "" if it can."""
        for gone, before in self.after.items():
            if gone != rank and (before < collectives or is_at_meeting):
                return (
                    f"rank {gone} has left the job after {before} collectives, such as to_global, but rank {rank} "
                    f"begins collective number {collectives}; {_REMEDY}"
                )
        return ""

    def note(self, rank: int, seconds: float) -> None:
        """Record after how many seconds a rank counts as waiting forever; 0 if it does not wait. On rank 0."""
        self._waiting[rank] = seconds
        all_wait = len(self._waiting) == self._world_size and all(self._waiting.values())
        self._all_wait_since = min(self._all_wait_since, time.monotonic()) if all_wait else float("inf")

    def verdict(self) -> str:
        """Which ranks wait forever for ranks that have left; "" while a rank may continue."""
        others = sorted(set(range(self._world_size)) - set(self.after))
        if not others or time.monotonic() - self._all_wait_since <= max(self._waiting.values(), default=0.0):
            return ""
        left = " and ".join(
            f"rank {rank} has left the job after {self.after[rank]} collectives" for rank in sorted(self.after)
        )
        return f"{left}, and rank {', '.join(map(str, others))} waits in a collective; {_REMEDY}"
