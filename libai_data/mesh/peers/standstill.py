"""Detects that all ranks wait for each other in different places, so that none can continue.

Each rank knows where its main thread waits: in a collective of this package, for a batch that another rank reads, or in
OneFlow. A rank that computes, reads or writes does not wait. As long as one rank does not wait, there is no verdict.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict, dataclass
from typing import Optional

from libai_data.errors import by_rank

SECONDS_BETWEEN_REPORTS = 2.0
_SECONDS_UNTIL_REPORTED = 4.0
_SECONDS_FRESH = 10.0  # a rank that was stopped reports nothing more, and may continue

# How long all ranks wait before they count as waiting for ever, on one node and on several:
_SECONDS_FOR_BATCHES = 30.0, 300.0  # some for a batch of another rank, which may be on its way;
_SECONDS_IDLE = 30.0, 300.0  # or some in OneFlow, while no process computes;
_SECONDS_AT_ONE_PLACE = 300.0, float("inf")  # or all at the same place, while no process computes.

COLLECTIVE, BATCH, ONEFLOW = "collective", "batch", "oneflow"
FIRST_MEETING = "the first meeting of all ranks"

SAME_COLLECTIVES = (
    "Every rank must run the same collectives in the same order (to_global, synchronize, making and iterating over "
    "loaders, with the same read mode and check_every)"
)

Place = tuple[int, str, str]
"""Collectives of this package that were begun, the kind of the place, and what is waited for."""


@dataclass(frozen=True)
class Report:
    """Where a rank waits."""

    place: Place  # compared between ranks
    line: str  # of the user's program
    seconds: float  # since when
    is_idle: bool  # its process computes nothing

    def packed(self) -> str:
        """As a word for rank 0."""
        return json.dumps(asdict(self))

    @staticmethod
    def unpacked(word: str) -> Report:
        """The opposite of `packed`."""
        fields = json.loads(word)
        return Report(**{**fields, "place": tuple(fields["place"])})

    def in_words(self) -> str:
        """For an error."""
        return in_words(self.place, self.line)


def in_words(place: Place, line: str) -> str:
    """For an error: a place, and the line of the program that is there."""
    number, kind, what = place
    where = f"{what}, its collective number {number}" if kind == COLLECTIVE else f"{what}, after {number} collectives"
    return where + (f" ({line})" if line else "")


class OwnPlace:
    """Where this rank waits. `enter` and `leave` belong to the main thread, `report` to the one that watches."""

    def __init__(self) -> None:
        self._place: Optional[Place] = None
        self._seen: Optional[Place] = None
        self._since = 0.0

    def enter(self, place: Place) -> Optional[Place]:
        """The main thread waits here from now on; returns where it was, for `leave`."""
        before, self._place = self._place, place
        return before

    def leave(self, before: Optional[Place]) -> None:
        """The main thread waits there no more."""
        self._place = before

    def report(self, now: float, begun: int, in_oneflow: bool, is_idle: bool) -> Report | None:
        """Where the main thread has waited for some time; None if it does not.

        Since the last call, it has stood still inside of OneFlow (`in_oneflow`), or the whole process has (`is_idle`).
        `now` is of the monotonic clock, and `begun` collectives of this package were begun.
        """
        place = self._place
        if place is None and in_oneflow:
            # The same object as long as it stands there.
            place = self._seen if self._seen and self._seen[:2] == (begun, ONEFLOW) else None
            place = place or (begun, ONEFLOW, "in OneFlow")
        if place is not self._seen:
            self._seen, self._since = place, now
        if place is None or now - self._since < _SECONDS_UNTIL_REPORTED:
            return None
        return Report(place, line_of_program(), now - self._since, is_idle)


def line_of_program() -> str:
    """Where the main thread is in the user's program, as "train.py:12"; "" if it is nowhere there."""
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
        """A rank waits, as it says at this time."""
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
            # Who has completed a collective has met all others in it, so they complete it too.
            return _SECONDS_FOR_BATCHES[self._across_nodes]
        if not all(report.is_idle for report in reports):
            return float("inf")
        return (_SECONDS_IDLE if differ else _SECONDS_AT_ONE_PLACE)[self._across_nodes or self._has_gpus]
