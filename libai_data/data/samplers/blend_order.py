"""The order of a blend: which dataset has its turn at each place, and which sample of the dataset is there.

`blend_turns` decides which dataset has its turn. The n-th turn of a dataset gets the n-th sample of its own order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from heapq import merge
from itertools import accumulate
from typing import Any

import numpy as np

from libai_data.data.cached_property import cached_property
from libai_data.data.datasets.blend import Blend, blend_of, refuse_inner_blend
from libai_data.data.datasets.combine import length_of
from libai_data.data.random.hashing import combine64
from libai_data.data.samplers.blend_turns import Pattern, lane_patterns, patterns_of
from libai_data.data.samplers.lane_order import LaneOrder, lane_of_turn
from libai_data.data.samplers.order import Order
from libai_data.data.samplers.weighted_order import WeightedOrder
from libai_data.data.shard_use import ShardUse
from libai_data.errors import ConfigError

_OF_ONE_SAMPLE = Blend((1,), ((0, (1,)),))
_NEVER = 1 << 62


@dataclass(frozen=True)
class BlendOrder(Order):
    """Place -> (epoch, index) over concatenated datasets; each dataset is drawn in proportion to its weight.

    The epoch of a sample is the epoch of its own dataset. `epoch_size` is the number of samples of all datasets
    together. It only measures the progress of the stream.

    Args:
        size: number of samples of all datasets together.
        seed: decides the permutations; each dataset has its own.
        shuffle: another permutation of each dataset in each of its epochs.
        blend: sizes and proportions of the datasets.

    Raises:
        ConfigError: As for `Order`; or `epoch_size` leaves out a tail, but the datasets' epochs have different ends.
    """

    blend: Blend = _OF_ONE_SAMPLE

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(self.blend.sizes) != self.size:
            raise ConfigError(
                f"a blend of datasets of {list(self.blend.sizes)} samples cannot have {self.size} samples"
            )
        if not self.blend.steps:
            patterns_of(self.blend)
        if self.epoch_size != self.size:
            raise ConfigError(
                "drop_last leaves out the tail of each epoch, but the datasets of a blend end their epochs at "
                "different times; set drop_last=False for the sampler"
            )

    @cached_property
    def _members(self) -> Sequence[tuple[int, Any]]:
        """First index and order of each dataset; an empty dataset only keeps the numbering."""
        firsts = accumulate(self.blend.sizes, initial=0)
        sizes = enumerate(zip(firsts, self.blend.sizes))
        return [(first, self._member(number, first, size)) for number, (first, size) in sizes]

    def _member(self, number: int, first: int, size: int) -> Order:
        return Order(max(size, 1), combine64(self.seed, number), self.shuffle)

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """The weights in effect from each place on."""
        return lane_patterns(self.blend, lane_of_turn(self.lanes))

    @cached_property
    def _starts(self) -> list[int]:
        return [pattern.start for pattern in self.patterns]

    def taken_before(self, place: int) -> tuple[int, ...]:
        """The number of samples of each dataset before a place."""
        return tuple(int(self._taken_in_lanes(number, place).sum()) for number in range(len(self.blend.sizes)))

    def _taken_in_lanes(self, number: int, place: int) -> np.ndarray:
        """Samples of a dataset that each lane has before a place, int64 [lanes], in the order of the turns."""
        pattern = self.patterns[bisect_right(self._starts, place) - 1]
        places_of_lanes = (place - np.arange(self.lanes) + self.lanes - 1) // self.lanes
        return pattern.taken_before(number, places_of_lanes)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = np.asarray(positions, dtype=np.int64)
        # The dataset at each place, and the place in the dataset's own order.
        datasets, own = np.empty_like(places), np.empty_like(places)
        rounds, residues = np.divmod(places, self.lanes)
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        for number in np.unique(numbers).tolist():
            rows = numbers == number
            datasets[rows], turns = self.patterns[number].turns_at(residues[rows], rounds[rows])
            own[rows] = turns * self.lanes + residues[rows]
        epochs, indices = np.empty_like(places), np.empty_like(places)
        for number in np.unique(datasets).tolist():
            rows = datasets == number
            first, order = self._members[number]
            epochs[rows], own_indices = order.locate(own[rows])
            indices[rows] = first + own_indices
        return epochs, indices

    def uses_of(self, index: int, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        self._check_index(index)
        number = bisect_right(np.cumsum(self.blend.sizes).tolist(), index)
        low, high = int(self._taken_in_lanes(number, first).min()), int(self._taken_in_lanes(number, end).max())
        first_index, order = self._members[number]
        epochs, own = order.uses_of(index - first_index, low * self.lanes, (high + 1) * self.lanes)
        places = np.array([self._place_of(number, place) for place in own.tolist()], dtype=np.int64)
        used = np.flatnonzero((places >= first) & (places < end))
        used = used[places[used].argsort()]
        return epochs[used], places[used]

    def _place_of(self, number: int, own: int) -> int:
        """The place of a dataset's own-th sample; -1 if the dataset's weight becomes 0 before this sample."""
        turn, residue = divmod(own, self.lanes)
        taken = [int(pattern.taken[number, residue]) for pattern in self.patterns]
        found = self.patterns[bisect_right(taken, turn) - 1].round_of(number, residue, turn)
        return -1 if found < 0 else found * self.lanes + residue

    def to_json(self) -> dict[str, Any]:
        blend = self.blend
        state: dict[str, Any] = {"sizes": list(blend.sizes)}
        state["phases"] = [[start, list(counts)] for start, counts in blend.phases]
        if blend.limits:
            state.update(limits=list(blend.limits), limited_from=blend.limited_from)
        return {**super().to_json(), "blend": state}


@dataclass(frozen=True)
class LanedBlendOrder(BlendOrder, LaneOrder):
    """A blend of datasets with shards, each of which is read in lanes.

    Place p is round p // lanes of a lane. Each lane counts its own rounds, which follow the table of the weights. The
    n-th turn of a dataset in a lane gets the n-th sample of this lane in the dataset's own `LaneOrder`. So a lane has
    the exact proportions, and reads a span of the shards of each dataset. The lanes begin at slots that are spread over
    the table. So a batch has about the same proportions.

    The weights change at the same place for all lanes. If a dataset has a limit, its weight becomes 0 where the blend
    without lanes reaches the limit.
    """

    @cached_property
    def _shard_ends(self) -> np.ndarray:
        return np.cumsum(np.zeros(0, dtype=np.int64) if self.lengths is None else self.lengths)

    @cached_property
    def _shards(self) -> tuple[slice, ...]:
        """The shards with samples of each dataset."""
        ends = np.cumsum([0, *self.blend.sizes])
        firsts = np.searchsorted(self._shard_ends, ends[:-1], side="right")
        lasts = np.searchsorted(self._shard_ends, ends[1:], side="left")
        return tuple(slice(first, last + 1) for first, last in zip(firsts.tolist(), lasts.tolist()))

    def _member(self, number: int, first: int, size: int) -> LaneOrder:
        lengths = None
        if self.lengths is not None:
            ends = np.minimum(self._shard_ends[self._shards[number]], first + size)
            lengths = np.diff(ends, prepend=first)
        seed = combine64(self.seed, number)
        return LaneOrder(max(size, 1), seed, self.shuffle, 0, self.lanes, self.block, self.digest, lengths)

    def shard_uses(self, rows: range, batch_size: int, first_batch: int = 0) -> Iterator[ShardUse]:
        residues = self._turn_of_lane[self.lanes_of(rows, batch_size)].tolist()
        uses: list[Iterator[ShardUse]] = []
        for number in np.flatnonzero(self.blend.sizes).tolist():
            begins = self._taken_in_lanes(number, first_batch * batch_size).tolist()
            uses += [self._uses_of_member(number, residue, begins[residue], batch_size) for residue in residues]
        return merge(*uses, key=lambda use: use.first)

    def _uses_of_member(self, number: int, residue: int, begin: int, batch_size: int) -> Iterator[ShardUse]:
        """The uses of a dataset's shards in a lane, from the lane's begin-th sample of the dataset on."""
        start, lane = begin * self.lanes + residue, int(self._lane_of_turn[residue])
        # If the dataset's last weight is 0, this is the lane's last place in the dataset's own order.
        last = (int(self.patterns[-1].taken[number, residue]) - 1) * self.lanes + residue
        for shard, low, high in self._members[number][1].visits_from(lane, start):
            first, end = self._place_of(number, max(low, start)), self._place_of(number, high)
            if first < 0:
                return
            end = self._place_of(number, last) if end < 0 else end
            yield ShardUse(self._shards[number].start + shard, first // batch_size, end // batch_size)

    def most_bytes(self, rows: range, batch_size: int, batches: int, sizes: np.ndarray) -> int:
        full = np.flatnonzero(self.blend.sizes).tolist()
        of_members = [(self._members[number][1], sizes[self._shards[number]]) for number in full]
        return sum(order.most_bytes(rows, batch_size, batches, own) for order, own in of_members)

    def next_use(self, shard: int, batch_size: int, batch: int) -> int:
        start, found = (batch + 1) * batch_size, _NEVER
        for number, shards in enumerate(self._shards):
            if self.blend.sizes[number] and shards.start <= shard < shards.stop:
                found = min(found, self._next_begin(number, shard - shards.start, start))
        return found // batch_size

    def _next_begin(self, number: int, shard: int, start: int) -> int:
        """The first place at or after `start` at which a block with this shard of a dataset begins, in any lane."""
        order, found, last = self._members[number][1], _NEVER, self.patterns[-1]
        own = int(self._taken_in_lanes(number, start).min()) * self.lanes
        end = _NEVER if last.counts[number] else int(last.taken[number].max()) * self.lanes
        # A lane may have a later sample of the dataset's own order before another lane has an earlier one.
        while (own := order.next_begin(shard, own)) < end:
            place = self._place_of(number, own)
            if start <= place < found:
                found, end = place, int(self._taken_in_lanes(number, place).max()) * self.lanes
            own += 1
        return found


def order_over(dataset: Any, seed: int, shuffle: bool, laned: LaneOrder | None = None) -> Order:
    """The endless order of a dataset; for a blend, the order of the blend. `laned` is the order of the dataset in
    lanes, None to read it without. A ConfigError if a part of the dataset is a blend, whose weights the order would
    ignore."""
    blend = blend_of(dataset)
    refuse_inner_blend(dataset)
    order = laned or Order(length_of(dataset), seed, shuffle)
    return order if blend is None else _blended(order, blend)


def _blended(order: Order, blend: Blend) -> BlendOrder:
    """The order of a blend, whose datasets have orders of the same kind, in lanes or not."""
    kind = LanedBlendOrder if isinstance(order, LaneOrder) else BlendOrder
    return kind(**{each.name: getattr(order, each.name) for each in fields(order)}, blend=blend)


def order_from_json(state: Any) -> Order:
    """Read an order from the result of its `to_json`; a ConfigError if its numbers are impossible."""
    plain = state["samples"], state["seed"], bool(state["shuffle"]), state["epoch_size"]
    if "weights" in state:
        return WeightedOrder(*plain, state["weights"]["digest"], state["weights"]["replacement"])
    order = Order(*plain)
    if "lanes" in state:
        lanes = state["lanes"]
        order = LaneOrder(*plain, lanes["lanes"], lanes["block"], lanes["digest"])
    if "blend" not in state:
        return order
    blend = state["blend"]
    phases = tuple((int(start), tuple(int(count) for count in counts)) for start, counts in blend["phases"])
    limits = tuple(blend.get("limits", ())), blend.get("limited_from", 0)
    return _blended(order, Blend(tuple(int(size) for size in blend["sizes"]), phases, (), *limits))
