"""The order of a blend: which dataset's turn it is at each place, and which of its samples comes.

Turns follow a table of one period, an earliest-deadline-first schedule of windows: the j-th sample of a dataset of
share w comes between floor(j / w) and ceil((j + 1) / w). That there is such a schedule, in which each dataset is always
less than one sample from its share, is shown by S. Baruah, N. Cohen, C. Plaxton and D. Varvel, "Proportionate progress"
(Algorithmica 15, 1996). Everything else is arithmetic: any place is found in O(1).

A dataset that reaches its limit has no turn any more: from this place on, the weights of the others make up the table.
All such places follow from sizes, weights and limits, so that the state need not hold them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from heapq import heappop, heappush
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from libai_data.data.datasets.blend import Blend
from libai_data.data.datasets.combine import length_of
from libai_data.data.random.hashing import combine64
from libai_data.data.samplers.lane_order import LaneOrder
from libai_data.data.samplers.order import Order
from libai_data.data.samplers.weighted_order import WeightedOrder
from libai_data.errors import ConfigError


class Turns(NamedTuple):
    """Whose turn it is in one period.

    Args:
        datasets: int64 [period], the number of the dataset whose turn it is.
        ranks: int64 [period], how many turns this dataset had before.
        slots: for each dataset its turns, int64 [turns of it], ascending.
    """

    datasets: np.ndarray
    ranks: np.ndarray
    slots: tuple[np.ndarray, ...]


@lru_cache(maxsize=16)
def turns_of(counts: tuple[int, ...]) -> Turns:
    """The turns of a period in which each dataset has so many."""
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
    """Weights in effect from a place on.

    Args:
        start: the place.
        counts: samples of each dataset in one period; 0 for one that has reached its limit.
        taken: samples of each dataset that were taken before.
    """

    start: int
    counts: tuple[int, ...]
    taken: tuple[int, ...]

    def taken_before(self, place: int) -> tuple[int, ...]:
        """Samples of each dataset before a place at which these weights hold, or before the next place."""
        periods, rest = divmod(place - self.start, sum(self.counts))
        return tuple(
            base + periods * count + int(np.searchsorted(own, rest))
            for base, count, own in zip(self.taken, self.counts, turns_of(self.counts).slots)
        )

    def place_of(self, number: int, own: int) -> int:
        """The place of a dataset's own-th sample, if these weights hold there; -1 if they have none of it."""
        count = self.counts[number]
        if not count:
            return -1
        periods, rank = divmod(own - self.taken[number], count)
        return self.start + periods * sum(self.counts) + int(turns_of(self.counts).slots[number][rank])


@lru_cache(maxsize=16)
def patterns_of(blend: Blend) -> tuple[Pattern, ...]:
    """The weights of a blend, as they are where datasets reach their limits."""
    patterns: list[Pattern] = []
    limits = blend.limits or (None,) * len(blend.sizes)
    ends = [*(start for start, _ in blend.phases[1:]), None]
    for (start, weights), end in zip(blend.phases, ends):
        place: int | None = start
        while place is not None and place != end:
            taken = patterns[-1].taken_before(place) if patterns else (0,) * len(limits)
            ended = [
                limit is not None and place >= blend.limited_from and done >= limit
                for limit, done in zip(limits, taken)
            ]
            counts = tuple(0 if over else count for over, count in zip(ended, weights))
            if not any(counts):
                raise ConfigError(
                    f"after {place} samples of the stream, each dataset with a weight has reached its max_epochs: the "
                    "blend has no more samples, but the stream has no end; give one dataset None in max_epochs"
                )
            divisor = reduce(gcd, counts)
            counts = tuple(count // divisor for count in counts)
            if not patterns or patterns[-1].counts != counts:
                patterns.append(Pattern(place, counts, taken))
            # Behind the last sample that a dataset may yield, the weights change again.
            last = patterns[-1]
            behind = [
                max(last.place_of(number, limit - 1) + 1, blend.limited_from)
                for number, limit in enumerate(limits)
                if limit is not None and counts[number]
            ]
            place = min([*behind, *([] if end is None else [end])], default=None)
    return tuple(patterns)


def phases_of(blend: Blend) -> Blend:
    """A blend without limits that has the same weights at each place."""
    return Blend(blend.sizes, tuple((start, counts) for start, counts, _ in patterns_of(blend)))


_OF_ONE_SAMPLE = Blend((1,), ((0, (1,)),))


@dataclass(frozen=True)
class BlendOrder(Order):
    """Place -> (epoch, index) over datasets one behind the other, each taken in proportion to its weight.

    An epoch is that of the sample's own dataset. `epoch_size` is the number of samples of all datasets together; it
    serves to count how far the stream is.

    Args:
        size: number of samples of all datasets together.
        seed: decides the permutations; each dataset has its own.
        shuffle: another permutation of each dataset in each of its epochs.
        blend: sizes and proportions.

    Raises:
        ConfigError: As for `Order`; or part of an epoch is to be left out, which a blend does not have in common.
    """

    blend: Blend = _OF_ONE_SAMPLE

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(self.blend.sizes) != self.size:
            raise ConfigError(f"a blend of datasets of {list(self.blend.sizes)} samples cannot have {self.size}")
        if not self.blend.steps:
            patterns_of(self.blend)
        if self.epoch_size != self.size:
            raise ConfigError(
                "drop_last leaves out the tail of each epoch, but the datasets of a blend end theirs at different "
                "times; set drop_last=False for the sampler"
            )

    @cached_property
    def _members(self) -> tuple[tuple[int, Order], ...]:
        """First index and order of each dataset that has samples; of another only its number counts."""
        first, members = 0, []
        for number, size in enumerate(self.blend.sizes):
            members.append((first, Order(max(size, 1), combine64(self.seed, number), self.shuffle)))
            first += size
        return tuple(members)

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The weights, as they are in effect."""
        return patterns_of(self.blend)

    @cached_property
    def _starts(self) -> list[int]:
        return [pattern.start for pattern in self.patterns]

    def taken_before(self, place: int) -> tuple[int, ...]:
        """How many samples of each dataset lie before a place."""
        return self.patterns[bisect_right(self._starts, place) - 1].taken_before(place)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = np.asarray(positions, dtype=np.int64)
        datasets, own = np.empty_like(places), np.empty_like(places)
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        for number in np.unique(numbers).tolist():
            rows = numbers == number
            start, counts, taken = self.patterns[number]
            turns = turns_of(counts)
            periods, slots = np.divmod(places[rows] - start, sum(counts))
            turn_of = turns.datasets[slots]
            datasets[rows] = turn_of
            in_periods = periods * np.array(counts, dtype=np.int64)[turn_of]
            own[rows] = np.array(taken, dtype=np.int64)[turn_of] + in_periods + turns.ranks[slots]
        epochs, indices = np.empty_like(places), np.empty_like(places)
        for number in np.unique(datasets).tolist():
            rows = datasets == number
            first, order = self._members[number]
            epochs[rows], own_indices = order.locate(own[rows])
            indices[rows] = first + own_indices
        return epochs, indices

    def uses_of(self, index: int, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        number, own_index = self._own(index)
        own_first, own_end = self.taken_before(first)[number], self.taken_before(end)[number]
        epochs, own = self._members[number][1].uses_of(own_index, own_first, own_end)
        return epochs, np.array([self._place_of(number, place) for place in own.tolist()], dtype=np.int64)

    def _own(self, index: int) -> tuple[int, int]:
        """The number of a sample's dataset, and its index there."""
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} is outside a dataset of {self.size} samples")
        number = bisect_right(np.cumsum(self.blend.sizes).tolist(), index)
        return number, index - self._members[number][0]

    def _place_of(self, number: int, own: int) -> int:
        """The place of a dataset's own-th sample; -1 if its weight is 0 when it would come."""
        pattern = self.patterns[bisect_right([pattern.taken[number] for pattern in self.patterns], own) - 1]
        return pattern.place_of(number, own)

    def find(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        places = []
        for index in np.asarray(indices).tolist():
            number, own_index = self._own(index)
            own = int(self._members[number][1].find(epoch, np.array([own_index]))[0])
            places.append(self._place_of(number, own))
        return np.array(places, dtype=np.int64)

    def to_json(self) -> dict[str, Any]:
        blend = self.blend
        state: dict[str, Any] = {"sizes": list(blend.sizes)}
        state["phases"] = [[start, list(counts)] for start, counts in blend.phases]
        if blend.limits:
            state.update(limits=list(blend.limits), limited_from=blend.limited_from)
        return {**super().to_json(), "blend": state}


def order_over(dataset: Any, seed: int, shuffle: bool) -> Order:
    """The endless order of a dataset: that of its blend, if it is one."""
    blend = getattr(dataset, "blend", None)
    if isinstance(blend, Blend):
        return BlendOrder(length_of(dataset), seed, shuffle, blend=blend)
    return Order(length_of(dataset), seed, shuffle)


def order_from_json(state: Any) -> Order:
    """Read what `to_json` of an order made.

    Raises:
        ConfigError: It cannot be an order.
        KeyError, TypeError, ValueError: It is malformed.
    """
    plain = state["samples"], state["seed"], bool(state["shuffle"]), state["epoch_size"]
    if "weights" in state:
        return WeightedOrder(*plain, state["weights"]["digest"], state["weights"]["replacement"])
    if "lanes" in state:
        lanes = state["lanes"]
        return LaneOrder(*plain, lanes["lanes"], lanes["block"], lanes["digest"])
    if "blend" not in state:
        return Order(*plain)
    blend = state["blend"]
    phases = tuple((int(start), tuple(int(count) for count in counts)) for start, counts in blend["phases"])
    limits = tuple(blend.get("limits", ())), blend.get("limited_from", 0)
    return BlendOrder(*plain, blend=Blend(tuple(int(size) for size in blend["sizes"]), phases, (), *limits))
