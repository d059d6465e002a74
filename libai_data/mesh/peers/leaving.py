"""Which ranks have left the job, and whether the others need them."""

from __future__ import annotations

import time

_REMEDY = (
    "every rank must use the same batches and steps, and end after them (a rank that breaks out of its loop, returns "
    "or calls sys.exit early leaves the others waiting)"
)


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

    def waits(self, rank: int) -> float:
        """Seconds for which a rank must wait to count as waiting forever; 0 if it does not wait."""
        return self._waiting.get(rank, 0.0)

    def note(self, rank: int, seconds: float) -> None:
        """Record whether a rank waits for others; `seconds` as `waits` returns them."""
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
