"""The turns of the datasets of a blend: the table of one period of the weights, and the weights from each place on.

Turns follow a table of one period, an earliest-deadline-first schedule of windows: the j-th sample of a dataset of
share w comes between floor(j / w) and ceil((j + 1) / w). S. Baruah, N. Cohen, C. Plaxton and D. Varvel, "Proportionate
progress" (Algorithmica 15, 1996), show that such a schedule exists. In this schedule, each dataset is always less than
one sample from its share. Everything else is arithmetic: any place is found in O(1).

A dataset that reached its limit has no more turns: from this place on, the table has the weights of the others.
All these places follow from sizes, weights and limits, so the state does not store them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from math import gcd
from typing import NamedTuple

import numpy as np

from libai_data.data.datasets.blend import Blend
from libai_data.data.random.hashing import mix64_array
from libai_data.errors import ConfigError

_ONE_LANE = np.zeros(1, dtype=np.int64)


class Turns(NamedTuple):
    """The turns of the datasets in one period."""

    datasets: np.ndarray  # int64 [period], the dataset of each slot
    ranks: np.ndarray  # int64 [period], how many slots this dataset had before in the period
    slots: tuple[np.ndarray, ...]  # of each dataset, int64, ascending


@lru_cache(maxsize=16)
def turns_of(counts: tuple[int, ...]) -> Turns:
    """The turns of one period; `counts` has the number of turns of each dataset."""
    period = sum(counts)
    released: list[list[tuple[int, int]]] = [[] for _ in range(period)]
    for number, count in enumerate(counts):
        for turn in range(count):
            released[turn * period // count].append((-(-(turn + 1) * period // count), number))
    waiting: list[tuple[int, int]] = []
    datasets = np.empty(period, dtype=np.int64)
    for place, windows in enumerate(released):
        for window in windows:
            heappush(waiting, window)
        datasets[place] = heappop(waiting)[1]
    slots = tuple(np.flatnonzero(datasets == number) for number in range(len(counts)))
    ranks = np.empty(period, dtype=np.int64)
    for own in slots:
        ranks[own] = np.arange(len(own))
    return Turns(datasets, ranks, slots)


class Pattern(NamedTuple):
    """Weights in effect from a place on, in each lane; a blend without lanes has a single one.

    A lane is named by its residue, the remainder of its places divided by the number of lanes. Its turns are counted in
    rounds: round r of residue s is place r * lanes + s.
    """

    start: int  # the place
    counts: tuple[int, ...]  # samples of each dataset in one period; 0 if it has reached its limit
    begins: np.ndarray  # int64 [lanes], the round in which the lane's period begins; up to one period before the place
    bases: np.ndarray  # int64 [datasets, lanes], samples before this round, as if these weights were in effect
    taken: np.ndarray  # int64 [datasets, lanes], samples of each dataset that the lane has before the place

    def turns_at(self, residues: np.ndarray, rounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The dataset at each of these rounds, and how many turns it had before in the lane, int64 [n] each."""
        table = turns_of(self.counts)
        periods, slots = np.divmod(rounds - self.begins[residues], sum(self.counts))
        datasets = table.datasets[slots]
        before = self.bases[datasets, residues] + periods * np.array(self.counts, dtype=np.int64)[datasets]
        return datasets, before + table.ranks[slots]

    def taken_before(self, number: int, rounds: np.ndarray) -> np.ndarray:
        """Samples of a dataset that each lane has before its round, int64 [lanes].

        The rounds are in the range of these weights, or at its end.
        """
        periods, rest = np.divmod(rounds - self.begins, sum(self.counts))
        inner = np.searchsorted(turns_of(self.counts).slots[number], rest)
        return np.asarray(self.bases[number] + periods * self.counts[number] + inner)

    def round_of(self, number: int, residue: int, turn: int) -> int:
        """The round in which a lane has its turn-th sample of a dataset; -1 if the dataset's weight is 0."""
        count = self.counts[number]
        if not count:
            return -1
        periods, rank = divmod(turn - int(self.bases[number, residue]), count)
        slot = int(turns_of(self.counts).slots[number][rank])
        return int(self.begins[residue]) + periods * sum(self.counts) + slot


@lru_cache(maxsize=16)
def patterns_of(blend: Blend) -> tuple[Pattern, ...]:
    """The weights of a blend from each place on at which a phase begins or a dataset reaches its limit."""
    patterns: list[Pattern] = []
    limits = blend.limits or (None,) * len(blend.sizes)
    ends = [*(start for start, _ in blend.phases[1:]), None]
    for (start, weights), end in zip(blend.phases, ends):
        place: int | None = start
        while place is not None and place != end:
            ended = [
                limit is not None and place >= blend.limited_from and _taken(patterns, number, place) >= limit
                for number, limit in enumerate(limits)
            ]
            counts = tuple(0 if over else count for over, count in zip(ended, weights))
            if not any(counts):
                raise ConfigError(
                    f"after {place} samples of the stream, each dataset with a weight has reached its max_epochs: the "
                    "blend has no more samples, but the stream has no end; give one dataset None in max_epochs"
                )
            divisor = gcd(*counts)
            counts = tuple(count // divisor for count in counts)
            if not patterns or patterns[-1].counts != counts:
                patterns.append(_pattern(patterns, place, counts, _ONE_LANE))
            # After the last sample that a dataset may yield, the weights change again.
            last = patterns[-1]
            behind = [
                max(last.round_of(number, 0, limit - 1) + 1, blend.limited_from)
                for number, limit in enumerate(limits)
                if limit is not None and counts[number]
            ]
            place = min([*behind, *([] if end is None else [end])], default=None)
    return tuple(patterns)


def _taken(patterns: Sequence[Pattern], number: int, place: int) -> int:
    return int(patterns[-1].taken_before(number, np.array([place]))[0]) if patterns else 0


def phases_of(blend: Blend) -> Blend:
    """A blend without limits that has the same weights at each place."""
    return Blend(blend.sizes, tuple((pattern.start, pattern.counts) for pattern in patterns_of(blend)))


def lane_patterns(blend: Blend, lanes: np.ndarray) -> tuple[Pattern, ...]:
    """The weights of a blend, with the places of all phases, in each lane, for each of `patterns_of`. `lanes` is the
    lane of each residue, int64 [lanes]."""
    found: list[Pattern] = []
    for pattern in patterns_of(blend):
        found.append(_pattern(found, pattern.start, pattern.counts, lanes))
    return tuple(found)


def _pattern(before: Sequence[Pattern], start: int, counts: tuple[int, ...], lanes: np.ndarray) -> Pattern:
    """The weights `counts` from a place on, after other weights.

    The lanes begin at slots that are spread over the period. A hash of the lane moves each lane within its share of the
    period. Without the hash, if the table repeats after a share, all lanes would have the same dataset at once.
    """
    residues, count = np.arange(len(lanes)), len(lanes)
    rounds = (start - residues + count - 1) // count
    taken = np.zeros((len(counts), count), dtype=np.int64)
    for number in range(len(counts)):
        if before:
            taken[number] = before[-1].taken_before(number, rounds)
    spread = (lanes << 16) + (mix64_array(lanes.astype(np.uint64)) >> np.uint64(48)).astype(np.int64)
    shifts = (spread * sum(counts) >> 16) // count
    bases = taken - np.stack([np.searchsorted(own, shifts) for own in turns_of(counts).slots])
    return Pattern(start, counts, rounds - shifts, bases, taken)
