"""Finite passes over a stream transform, whose number of outputs nobody knows before they are made."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sized
from typing import Any

import numpy as np

from libai_data.data.datasets.stream_transform import Start, StreamTransform, place_and_offset, remember, start_of
from libai_data.data.samplers.blend_order import BlendOrder, order_from_json, order_over
from libai_data.data.samplers.cursor import EpochPositions
from libai_data.data.samplers.resuming import refuse
from libai_data.data.samplers.sampler import IndexBatch, StreamSampler
from libai_data.data.samplers.stream_state import PAIR, Keys, check_state
from libai_data.data.samplers.walk import UNKNOWN, Walk
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import EPOCH, FLAG, MAPPING, check, one_of, or_none

_STARTS_KEPT = 2048
_ENDS = one_of("short", "pad", "drop")


class TransformRounds(EpochPositions, StreamSampler):
    """All outputs of a stream transform in each pass; each pass is the next epoch, and begins with its first sample.

    Nothing is scanned: the outputs of a batch are found when it is read, from the place where the batch before it
    ended. The state holds this place. The last output of an epoch may be padded.

    Args:
        dataset: a `StreamTransform`.
        ends: what happens to the last outputs of an epoch if they fill no global batch: "short", "pad" or "drop".
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
    ) -> None:
        check({"shuffle": FLAG, "ends": _ENDS}, shuffle=shuffle, ends=ends)
        order = order_over(dataset, seed, shuffle)
        if isinstance(order, BlendOrder):
            raise ConfigError("a blend has no epoch that has each sample once; use ends='cycle' or CyclicSampler")
        super().__init__(dataset, micro_batch_size, order, data_parallel_rank, data_parallel_size)
        self.ends = ends
        self._rounds = Walk(dataset if isinstance(dataset, StreamTransform) else None, order, in_rounds=True)
        self._starts: OrderedDict[tuple[int, int], int] = OrderedDict()

    def batches_per_round(self) -> int:
        raise TypeError("the number of batches in an epoch of a stream transform is not known in advance")

    def batches(self, position: int) -> Iterator[IndexBatch]:
        """This rank's parts of all batches from `position` to the end of the cursor's epoch.

        If nothing is left of it, the batches of the next epoch.

        Raises:
            ConfigError: An epoch has no output.
        """
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
        firsts, end = self._rounds.of_round(epoch, self._start_at(epoch, position), size)
        valid = len(firsts)
        if not valid and not position:
            raise ConfigError(f"{type(self.dataset).__name__} keeps nothing of all {self.order.size} samples")
        if not valid or (valid < size and self.ends == "drop"):
            return None
        self.note_start(position + valid, end)
        if self.ends == "short":
            size = -(-valid // self.data_parallel_size) * self.data_parallel_size
        own = firsts[np.minimum(self._rows_of(size), valid - 1)]
        number = position // self.global_batch_size
        return IndexBatch(number, epoch, position, size, valid, np.full_like(own, epoch), own, end)

    def _start_at(self, epoch: int, position: int) -> int:
        first = epoch * self.order.epoch_size
        if not position:
            return first
        start = self._starts.get((epoch, position))
        return self._rounds.of_round(epoch, first, position)[1] if start is None else start

    def note_start(self, position: int, start: Start | None) -> None:
        if not isinstance(start, int) or start == UNKNOWN or not position:
            return
        place, offset = place_and_offset(start)
        # Behind an output: the place where an epoch ends is that where the next one begins.
        epoch = (place - (offset == 0)) // self.order.epoch_size
        remember(self._starts, (epoch, position), start, _STARTS_KEPT)

    makes_outputs = True

    def _place_at(self, position: int) -> int | None:
        epoch = self.cursor.epoch
        if not position:
            return epoch * self.order.epoch_size
        start = self._starts.get((epoch, position))
        return None if start is None else int(place_and_offset(start)[0])

    def take_over(self, other: StreamSampler) -> None:
        if isinstance(other, TransformRounds):
            self._starts.update(other._starts)

    @property
    def state(self) -> None:  # type: ignore[override]
        """None: the positions of an epoch do not tell its places."""

    def order_words(self) -> dict[str, Any]:
        """What a state must have in common with the stream that continues from it."""
        return {**self.order.to_json(), "ends": self.ends}

    def state_dict(self) -> dict[str, Any]:
        """Epoch, outputs of it that all ranks have taken, where the next one begins, and what decides the order."""
        start = self._starts.get((self.cursor.epoch, self.position))
        found = None if start is None else list(place_and_offset(start))
        return {"position": self.position, "epoch": self.cursor.epoch, "start": found, **self.order_words()}

    def load_state_dict(self, state: Mapping[str, Any], override: Collection[str] = ()) -> None:
        """Continue where another such sampler stopped, whatever its batch size and number of ranks were.

        Raises:
            CheckpointError: The state is that of another kind of stream, or of another order.
        """
        check_state(state, _STATE, "a loader over the epochs of a stream transform")
        saved, own = order_from_json(state), self.order
        if saved != own:
            was, now = saved.to_json(), own.to_json()
            words = [f"{key} was {was.get(key)} and is now {now.get(key)}" for key in now if was.get(key) != now[key]]
            # What a transform makes of several samples depends on their order: no override helps.
            refuse({"restart_data": ", ".join(words)}, ())
        self.set_epoch(int(state["epoch"]))
        self.cursor = self.cursor._replace(position=int(state["position"]))
        self.note_start(self.position, None if state["start"] is None else start_of(*state["start"]))


_STATE = Keys(
    {**dict.fromkeys(("position", "epoch"), EPOCH), "start": or_none(PAIR), "ends": _ENDS},
    {"dataset": or_none(MAPPING)},
    others=True,
)
