"""The order of a blend: which dataset's turn it is at each place, and which of its samples comes.

Turns follow a table of one period, an earliest-deadline-first schedule of windows: the j-th sample of a dataset of
share w comes between floor(j / w) and ceil((j + 1) / w). That there is such a schedule, in which each dataset is always
less than one sample from its share, is shown by S. Baruah, N. Cohen, C. Plaxton and D. Varvel, "Proportionate progress"
(Algorithmica 15, 1996). Everything else is arithmetic: any place is found in O(1).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from libai_data.data.datasets.blend import Blend
from libai_data.data.datasets.combine import length_of
from libai_data.data.random.hashing import combine64
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

    @cached_property
    def _starts(self) -> list[int]:
        return [start for start, _ in self.blend.phases]

    @cached_property
    def _taken(self) -> list[tuple[int, ...]]:
        """Samples of each dataset that were taken before each phase."""
        taken = [(0,) * len(self.blend.sizes)]
        for number, end in enumerate(self._starts[1:]):
            taken.append(self._taken_in_phase(number, taken[-1], end))
        return taken

    def _taken_in_phase(self, phase: int, before: tuple[int, ...], place: int) -> tuple[int, ...]:
        start, counts = self.blend.phases[phase]
        periods, rest = divmod(place - start, sum(counts))
        slots = turns_of(counts).slots
        return tuple(
            base + periods * count + int(np.searchsorted(own, rest)) for base, count, own in zip(before, counts, slots)
        )

    def taken_before(self, place: int) -> tuple[int, ...]:
        """How many samples of each dataset lie before a place."""
        phase = bisect_right(self._starts, place) - 1
        return self._taken_in_phase(phase, self._taken[phase], place)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = np.asarray(positions, dtype=np.int64)
        datasets, own = np.empty_like(places), np.empty_like(places)
        phases = np.searchsorted(self._starts, places, side="right") - 1
        for phase in np.unique(phases).tolist():
            rows = phases == phase
            start, counts = self.blend.phases[phase]
            turns = turns_of(counts)
            periods, slots = np.divmod(places[rows] - start, sum(counts))
            turn_of = turns.datasets[slots]
            taken = np.array(self._taken[phase], dtype=np.int64)
            datasets[rows] = turn_of
            own[rows] = taken[turn_of] + periods * np.array(counts, dtype=np.int64)[turn_of] + turns.ranks[slots]
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
        phase = bisect_right([taken[number] for taken in self._taken], own) - 1
        start, counts = self.blend.phases[phase]
        if not counts[number]:
            return -1
        periods, rank = divmod(own - self._taken[phase][number], counts[number])
        return start + periods * sum(counts) + int(turns_of(counts).slots[number][rank])

    def find(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        places = []
        for index in np.asarray(indices).tolist():
            number, own_index = self._own(index)
            own = int(self._members[number][1].find(epoch, np.array([own_index]))[0])
            places.append(self._place_of(number, own))
        return np.array(places, dtype=np.int64)

    def to_json(self) -> dict[str, Any]:
        phases = [[start, list(counts)] for start, counts in self.blend.phases]
        return {**super().to_json(), "blend": {"sizes": list(self.blend.sizes), "phases": phases}}


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
    if "blend" not in state:
        return Order(*plain)
    blend = state["blend"]
    phases = tuple((int(start), tuple(int(count) for count in counts)) for start, counts in blend["phases"])
    return BlendOrder(*plain, blend=Blend(tuple(int(size) for size in blend["sizes"]), phases))
