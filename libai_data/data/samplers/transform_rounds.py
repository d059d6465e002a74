"""Finite passes over a stream transform, whose number of outputs is not known in advance."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sized
from typing import Any

import numpy as np

from libai_data.data.datasets.stream_transform import Start, StreamTransform, place_and_offset, remember
from libai_data.data.samplers.batch_runs import rounded_up
from libai_data.data.samplers.blend_order import BlendOrder, order_from_json, order_over
from libai_data.data.samplers.cursor import EpochPositions, IndexBatch
from libai_data.data.samplers.lane_order import laned_order
from libai_data.data.samplers.order import check_holds_a_batch
from libai_data.data.samplers.resuming import RESTART_DATA
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.data.samplers.stream_state import ORDER, START, start_from_json
from libai_data.data.samplers.walk import UNKNOWN, Walk
from libai_data.errors import CheckpointError, ConfigError
from libai_data.errors.argument_rules import EPOCH, FLAG, MAPPING, check, one_of, or_none, whole
from libai_data.errors.saved_state import Keys, check_state

_STARTS_KEPT = 2048
_ENDS = one_of("short", "pad", "drop")


class TransformRounds(EpochPositions, StreamSampler):
    """All outputs of a stream transform in each pass; each pass is the next epoch, and begins with its first sample.

    The dataset is not scanned in advance. When the loader needs a batch, the sampler finds the batch's outputs from the
    place where the batch before ended. The state has this place. The last output of an epoch may be padded.

    Args:
        dataset: a `StreamTransform`.
        ends: how the last outputs of an epoch are used if they do not fill a global batch: "short", "pad" or "drop".
        lanes, block: as for `CyclicSampler`. Lanes take turns until no lane has outputs left.
        together: rows that a batch transform needs together; with "short", each rank gets a multiple of this number.

    The other arguments are those of `CyclicSampler`.
    """

    endless = False

    def __init__(
        self,
        dataset: Sized,
        micro_batch_size: int,
        shuffle: bool = False,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        seed: int = 0,
        ends: str = "short",
        lanes: int | None = None,
        block: int | None = None,
        together: int = 1,
    ) -> None:
        check({"shuffle": FLAG, "ends": _ENDS}, shuffle=shuffle, ends=ends)
        order = order_over(dataset, seed, shuffle, laned_order(dataset, seed, shuffle, lanes, block))
        if isinstance(order, BlendOrder):
            raise ConfigError("a blend has no epoch that has each sample once; use ends='cycle' or CyclicSampler")
        super().__init__(dataset, micro_batch_size, order, data_parallel_rank, data_parallel_size)
        self.ends = ends
        self._together = together
        self._rounds = Walk(dataset if isinstance(dataset, StreamTransform) else None, order, in_rounds=True)
        self._starts: OrderedDict[tuple[int, int], Start] = OrderedDict()

    def batches_per_round(self) -> int:
        raise TypeError("the number of batches in an epoch of a stream transform is not known in advance")

    def batches(self, position: int) -> Iterator[IndexBatch]:
        """This rank's parts of all batches from `position` to the end of the cursor's epoch; if no output is left in
        this epoch, the batches of the next epoch. A ConfigError if an epoch has no output, or with "drop" fewer than a
        global batch."""
        epoch = self.cursor.epoch
        batch = self._batch(epoch, position)
        if batch is None and position:
            epoch, position = epoch + 1, 0
            batch = self._batch(epoch, position)
        while batch is not None:
            yield batch
            position += batch.valid
            batch = self._batch(epoch, position)

    def _batch(self, epoch: int, position: int) -> IndexBatch | None:
        size = self.global_batch_size
        first = self._rounds.first_of_round(epoch)
        start = self._starts.get((epoch, position)) if position else first
        start = self._rounds.of_round(epoch, first, position)[1] if start is None else start
        firsts, end = self._rounds.of_round(epoch, start, size)
        valid = len(firsts)
        if not valid and not position:
            raise ConfigError(f"{type(self.dataset).__name__} keeps none of the {self.order.size} samples")
        if not position and self.ends == "drop":
            check_holds_a_batch(valid, size, self.data_parallel_size)
        if not valid or (valid < size and self.ends == "drop"):
            return None
        self.note_start(position + valid, end)
        if self.ends == "short":
            size = rounded_up(valid, self.data_parallel_size * self._together)
        firsts = firsts[self.order.rows_by_lane(place_and_offset(firsts)[0])]
        own = firsts[np.minimum(self.rows_of(size), valid - 1)]
        number = position // self.global_batch_size
        return IndexBatch(number, epoch, position, size, valid, np.full_like(own, epoch), own, end)

    def note_start(self, position: int, start: Start | None) -> None:
        if start is None or start == UNKNOWN or not position:
            return
        if isinstance(start, tuple):
            epoch = start[0]
        else:
            place, offset = place_and_offset(start)
            # The start is after an output, so a start at the first place of an epoch ends the epoch before.
            epoch = (place - (offset == 0)) // self.order.epoch_size
        remember(self._starts, (epoch, position), start, _STARTS_KEPT)

    makes_outputs = True
    # If a rank has no outputs left, it must know whether others have: this decides the epoch's end and the rows.
    follows_own_lanes = False

    def _place_at(self, position: int) -> int | None:
        epoch = self.cursor.epoch
        if not position:
            return epoch * self.order.epoch_size
        start = self._starts.get((epoch, position))
        starts = start[2:] if isinstance(start, tuple) else () if start is None else (start,)
        return min((int(place_and_offset(each)[0]) for each in starts), default=None)

    def take_over(self, other: StreamSampler) -> None:
        if isinstance(other, TransformRounds):
            self._starts.update(other._starts)

    @property
    def state(self) -> None:  # type: ignore[override]
        """None: the places of an epoch do not follow from its positions."""

    def order_words(self) -> dict[str, Any]:
        """The values that a saved state and the resumed stream must have in common."""
        return {**self.order.to_json(), "ends": self.ends}

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the number of its outputs that all ranks used, the start of the next one, and `order_words`."""
        start = self._starts.get((self.cursor.epoch, self.position))
        state = {"position": self.position, "epoch": self.cursor.epoch, "start": None, **self.order_words()}
        if isinstance(start, tuple):
            _, turn, *starts = start
            state.update(start=[list(place_and_offset(each)) for each in starts], turn=turn)
        elif start is not None:
            state["start"] = list(place_and_offset(start))
        return state

    def load_state_dict(self, state: Mapping[str, Any], override: Collection[str] = ()) -> None:
        """Continue where another such sampler stopped. Its batch size and number of ranks may differ. A CheckpointError
        if the state belongs to another kind of stream, or to another order."""
        check_state(state, _STATE, "a loader over the epochs of a stream transform")
        own = self.order
        try:
            saved = order_from_json(state)
            if saved != own:
                was, now = saved.to_json(), own.to_json()
                differs = [key for key in now if was.get(key) != now[key]]
                words = ", ".join(f"{key} was {was.get(key)} and is now {now[key]}" for key in differs)
                # Outputs are made of several consecutive samples, so no override can allow another order.
                raise CheckpointError(
                    f"the data state belongs to another stream: {words}; restore the old values, start a new run, or "
                    f"restart the data, in a trainer with train.resume_override=[{RESTART_DATA}]"
                )
            start = start_from_json(state["start"], own.lanes)
            if isinstance(start, tuple):
                check({"turn": whole(0, own.lanes - 1)}, turn=state.get("turn"))
                start = (state["epoch"], state["turn"], *start)
        except ConfigError as error:
            raise CheckpointError(f"the data state {dict(state)!r:.500} is broken: {error}") from error
        self.set_epoch(int(state["epoch"]))
        self.cursor = self.cursor._replace(position=int(state["position"]))
        self.restored_start = start
        self.note_start(self.position, self.restored_start)


_STATE = Keys(
    {"position": whole(0), "epoch": EPOCH, "start": START, "ends": _ENDS, **ORDER.required},
    {"dataset": or_none(MAPPING), "turn": whole(0), **ORDER.optional},
)
