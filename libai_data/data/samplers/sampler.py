"""The base of all samplers: a position in the stream, and this rank's part of each global batch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sized
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from libai_data.data.attributes import attribute_of
from libai_data.data.datasets.stream_transform import Start, place_and_offset, starts_of
from libai_data.data.samplers.batch_runs import Run
from libai_data.data.samplers.cursor import Cursor, IndexBatch, new_index_batch
from libai_data.data.samplers.order import Order
from libai_data.data.samplers.resuming import reconcile
from libai_data.data.samplers.schedule import LeftOut, StepSchedule
from libai_data.data.samplers.stream_state import StreamState
from libai_data.data.samplers.walk import UNKNOWN, Walk
from libai_data.data.shard_use import share_of_node
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import BATCH_SIZE, EPOCH, check, whole
from libai_data.structures import BatchInfo

logger = logging.getLogger(__name__)

_RULES = {
    "micro_batch_size": BATCH_SIZE,
    "data_parallel_size": BATCH_SIZE,
    "data_parallel_rank": whole(0),
    "consumed_samples": whole(0),
}
_WINDOW = 4096
"""Most samples whose indices a sampler computes at once; further limited to about one epoch."""
_SORTED = 1 << 18
"""Most rows of global batches that a sampler sorts by lane at once."""


class StreamSampler:
    """Base of the samplers: global batch k of size B has positions [kB, (k+1)B) of the stream, and data-parallel rank d
    reads the d-th contiguous part.

    Iteration yields one list of indices for each batch, like a `batch_sampler` of other libraries. The loader calls
    `batch_at(position)`, which any process can compute for any position in O(1).
    """

    endless: bool
    exchanges_starts = False
    """Whether ranks exchange the starts of their lanes before they save a state; loaders of several ranks set this."""
    restored_start: Start | None = None
    """For a stream transform, the start in the state that was restored last."""
    _walk: Walk | None = None
    _ranks_in_turn = 1

    def __init__(
        self,
        dataset: Sized,
        micro_batch_size: int,
        order: Order,
        data_parallel_rank: int,
        data_parallel_size: int,
        position: int = 0,
    ) -> None:
        check(_RULES, **locals(), consumed_samples=position)
        if data_parallel_rank >= data_parallel_size:
            raise ConfigError(
                f"data_parallel_rank is {data_parallel_rank}; with data_parallel_size {data_parallel_size} it can be "
                f"0 to {data_parallel_size - 1}"
            )
        self.dataset = dataset
        self.order = order
        self.micro_batch_size = int(micro_batch_size)
        self.data_parallel_rank = int(data_parallel_rank)
        self.data_parallel_size = int(data_parallel_size)
        self.cursor = Cursor(int(position))
        self.left_out = LeftOut()
        self.schedule: StepSchedule | None = None
        self._followed: StepSchedule | None = None
        self._serve((self.data_parallel_rank,))

    @property
    def position(self) -> int:
        """The position after the last row that was used. After it is set, the next pass begins there."""
        return self.cursor.position

    @position.setter
    def position(self, position: int) -> None:
        self.cursor = Cursor(position)

    def next_pass(self) -> Cursor:
        """The cursor where the next pass begins; an endless stream continues at the current cursor."""
        return self.cursor

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass with this epoch."""
        self.cursor = Cursor(self._place_of_epoch(epoch))

    def _place_of_epoch(self, epoch: int) -> int:
        check({"epoch": EPOCH}, epoch=epoch)
        place = int(epoch) * self.order.epoch_size
        check({"position": whole(0)}, position=place)
        return place

    def after(self, batch: IndexBatch | BatchInfo) -> Cursor:
        """The cursor after this batch was used."""
        return Cursor(batch.position + batch.size, start=batch.next_start)

    def after_pass(self) -> Cursor:
        """The cursor after a pass ended."""
        return self.cursor

    def _serve(self, shards: tuple[int, ...]) -> None:
        self._shards = shards
        self._forget_window()

    def _forget_window(self) -> None:
        """Drop the located samples, because the order or the position changed."""
        self._window_size = 0
        self._window: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def rows_of(self, size: int) -> np.ndarray:
        """The rows of this reader's shards in a global batch of this size, int64 [n]."""
        shard = np.arange(size // self.data_parallel_size, dtype=np.int64)
        return np.concatenate([first * len(shard) + shard for first in self._shards])

    def serving(self, shards: tuple[int, ...]) -> StreamSampler:
        """This sampler for a reader that reads for several data-parallel ranks, with these coordinates on the data
        axis, ascending; each batch concatenates their parts."""
        other = copy(self)
        other._serve(shards)
        return other

    def batches_per_round(self) -> int:
        """Number of batches of one pass, or of one epoch of an endless stream (rounded up)."""
        raise NotImplementedError

    def batch_runs(self) -> list[Run]:
        """The batches of an epoch, if they may have different sizes, and these are known in advance; else empty."""
        return []

    @property
    def global_batch_size(self) -> int:
        """Samples of one batch over all data-parallel ranks."""
        return self.micro_batch_size * self.data_parallel_size

    def batch_at(self, position: int) -> IndexBatch | None:
        """This rank's part of the global batch that begins at `position`, or None after the last batch of the epoch."""
        raise NotImplementedError

    def batches(self, position: int) -> Iterator[IndexBatch]:
        """This rank's parts of all batches from `position` to the end of the epoch; endless if the stream is."""
        batch = self.batch_at(position)
        while batch is not None:
            yield batch
            batch = self.batch_at(batch.position + batch.size)

    def _part(self, position: int, size: int, valid: int, number: int, end: int | None = None) -> IndexBatch:
        """Find this reader's rows of the number-th global batch, of which `valid` rows count; others repeat the last of
        these. `end` is where the epoch ends, if no batch may have rows of the next epoch."""
        full = self.global_batch_size  # The last batch of an epoch may be smaller.
        if end is not None and self._first_of_turns(position, full) + full * self._ranks_in_turn > end:
            places = self._places_of_rows(np.array([position]), size, self.rows_of(size), end)
            epochs, indices = self.order.locate(places.ravel())
        else:
            epochs, indices = self._full_part(position, size)
        place = int(self.left_out.places_of(np.array([position]))[0]) if self.left_out.ranges else position
        return new_index_batch((number, place // self.order.epoch_size, position, size, valid, epochs, indices, None))

    def _places_of_rows(self, positions: np.ndarray, size: int, rows: np.ndarray, end: int | None = None) -> np.ndarray:
        """The places of some rows, int64 [rows], of the batches that begin at these positions, int64 [batches],
        ascending: int64 [batches, rows]. For a single batch, rows from the position `end` on repeat the last one before
        it."""
        if self.order.lanes == 1:
            rows = rows if end is None else np.minimum(rows, end - 1 - positions[0])
            return self.left_out.places_of(positions[:, None] + rows)
        size = size if end is None else self.global_batch_size
        firsts = np.array([self._first_of_turns(position, size) for position in positions.tolist()])
        count = size * self._ranks_in_turn
        count = count if end is None else min(count, end - int(firsts[0]))
        places = self.order.in_rows(self.left_out.places_of(firsts[:, None] + np.arange(count)))
        return np.take_along_axis(places, np.minimum((positions - firsts)[:, None] + rows, count - 1), axis=1)

    def share_of_node(self, parts: float) -> float:
        """The fraction of a node's cache for this reader, if each node reads one of `parts` equal parts of the data."""
        return share_of_node(len(self._shards), self.data_parallel_size, parts)

    @property
    def measures_lanes(self) -> bool:
        """Whether the walk must read samples to find the outputs of lanes."""
        reads = self.makes_outputs and self.order.lanes > 1
        return reads and bool(attribute_of(self.dataset, "reads_to_measure", False))

    @property
    def follows_own_lanes(self) -> bool:
        """Whether this reader reads only samples of its own lanes; other readers know the starts of the other lanes."""
        return self.exchanges_starts and self.measures_lanes

    @property
    def reads_all_lanes(self) -> bool:
        """Whether this reader reads samples of all lanes to find the outputs of its own."""
        return self.measures_lanes and not self.follows_own_lanes

    @property
    def makes_outputs(self) -> bool:
        """Whether a stream transform makes outputs of the samples of the order."""
        return self._walk is not None

    def batch_of(self, position: int) -> int | None:
        """The number of a position's batch in `shard_plan_of`: its place // global batch size; None if not known."""
        place = self._place_at(position)
        return None if place is None else place // self.global_batch_size

    def position_of_batch(self, batch: int) -> int:
        """The first position whose `batch_of` may be this batch or a later one."""
        if self._walk is not None:
            return 0
        place = batch * self.global_batch_size
        return place - self.left_out.count_before(place)

    def _place_at(self, position: int) -> int | None:
        """The place of the first sample that is needed for a position; None if the place is not known."""
        if self._walk is None:
            return self.left_out.place_of(position)
        starts = starts_of(self._walk.known_start(position))
        return min((int(place_and_offset(start)[0]) for start in starts if start != UNKNOWN), default=None)

    def _first_of_turns(self, position: int, size: int) -> int:
        """The position at which the global batch begins that contains the batch at `position`."""
        if self._ranks_in_turn == 1:
            return position
        return position - (position - self._counted_from(position)) % (size * self._ranks_in_turn)

    def _counted_from(self, position: int) -> int:
        """The position from which the batches around `position` are counted."""
        return position // self.order.epoch_size * self.order.epoch_size

    def take_turns(self, ranks: int) -> None:
        """Let each batch be the part of one data-parallel rank, one after the other, instead of a global batch; the
        batches of so many ranks have the rows of one global batch."""
        self._ranks_in_turn = ranks
        self._forget_window()

    def _full_part(self, position: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Locate this rank's rows for many batches at once: a numpy call costs as much for 4,000 samples as for 40."""
        if size != self._window_size or position not in self._window:
            rows = self.rows_of(size)
            batches = min(_WINDOW // len(rows), self.order.epoch_size // size)
            if self.order.lanes > 1:
                batches = min(batches, _SORTED // size)
            batches = max(1, batches)
            starts = position + size * np.arange(batches, dtype=np.int64)
            epochs, indices = self.order.locate(self._places_of_rows(starts, size, rows).ravel())
            parts = zip(epochs.reshape(batches, -1), indices.reshape(batches, -1))
            self._window, self._window_size = dict(zip(starts.tolist(), parts)), size
        return self._window[position]

    def __iter__(self) -> Iterator[list[int]]:
        self.cursor = self.next_pass()
        for batch in self.batches(self.position):
            self.cursor = self.after(batch)
            yield batch.indices.tolist()
        self.cursor = self.after_pass()

    @property
    def state(self) -> StreamState:
        """The position in the stream and everything that decides the following samples."""
        start = None if self._walk is None else self._walk.known_start(self.position)
        return StreamState(int(self.position), self.order, self.left_out, self.schedule, start)

    @property
    def own_starts(self) -> dict[int, int]:
        """Turn of a lane -> where its next output begins, of lanes that this reader reads; of all after a resume."""
        starts = self.state.start if self.cursor.start is None else self.cursor.start
        return {turn: each for turn, each in enumerate(starts if isinstance(starts, tuple) else ()) if each != UNKNOWN}

    def note_start(self, position: int, start: Start | None) -> None:
        """Record the start of a stream transform's output at a position, which a reader has found."""
        if self._walk is not None and start is not None:
            self._walk.note(position, start)

    def state_dict(self) -> dict[str, Any]:
        """`state`, as JSON."""
        return self.state.to_json()

    def load_state_dict(self, state: Mapping[str, Any], override: Collection[str] = ()) -> None:
        """Continue where another sampler stopped, in O(1). Its batch size and number of ranks may differ.

        If this sampler follows a schedule of steps, a state whose steps had other sizes raises an error.

        Args:
            state: the `state_dict()` of a sampler.
            override: names from `OVERRIDES` that may differ; the log then shows which samples repeat or are left out.

        Raises:
            CheckpointError: The state belongs to another stream; the message has both values.
            ConfigError: `override` has an unknown name.
        """
        own = replace(self.state, left_out=LeftOut(), schedule=self._followed)
        resumed, notes = reconcile(state, own, self._places_to_skip, override)
        for note in notes:
            logger.warning("%s", note)
        self._continue_from(resumed)
        self.restored_start = resumed.start

    def _places_to_skip(self, schedule: StepSchedule) -> LeftOut:
        """The places that this sampler leaves out on purpose in a run of this schedule."""
        return LeftOut()

    def take_over(self, other: StreamSampler) -> None:
        """Continue with the order, position and schedule of another sampler of the same dataset."""
        self.order = other.order
        self._continue_from(other.state)

    def _continue_from(self, state: StreamState) -> None:
        self.position, self.left_out, self.schedule = state.position, state.left_out, state.schedule
        self.order = state.order
        self.note_start(state.position, state.start)
        self._forget_window()
