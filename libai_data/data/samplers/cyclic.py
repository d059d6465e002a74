"""The endless training stream."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sized
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from libai_data.data.attributes import attribute_of
from libai_data.data.datasets.stream_transform import StreamTransform, place_and_offset
from libai_data.data.samplers.blend_order import BlendOrder, order_over
from libai_data.data.samplers.cursor import IndexBatch
from libai_data.data.samplers.lane_order import LaneOrder, laned_order
from libai_data.data.samplers.order import check_holds_a_batch
from libai_data.data.samplers.resuming import continued_schedule
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.data.samplers.schedule import LeftOut, Ranges, StepSchedule, left_out_by
from libai_data.data.samplers.stream_state import StreamState
from libai_data.data.samplers.walk import Walk
from libai_data.data.samplers.weighted_order import drawn_order
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import FLAG, check, whole

_OF_TRANSFORMS = "what a stream transform makes of an epoch, and of the samples of a step, is not known in advance"


class _Stretch(NamedTuple):
    """Batches of equal size: the position of the first one, the rows of each, and the number of the first one."""

    position: int
    rows: int
    number: int


class CyclicSampler(StreamSampler):
    """An endless stream: each epoch has every sample once, and the next epoch follows without a gap.

    A batch that crosses the end of an epoch continues in the next epoch, or in several if the dataset is smaller than a
    batch. From a `BlendedDataset`, the sampler draws samples of each dataset in proportion to its weight, and each
    dataset has its own epochs. From a `FilteredDataset` or `PackedDataset`, the sampler draws the outputs in order.

    Args:
        dataset: an object with a length.
        micro_batch_size: samples of a batch for one data-parallel rank.
        shuffle: use another random order in each epoch.
        consumed_samples: samples that all ranks together have used so far.
        data_parallel_rank: this rank's coordinate on the data axis.
        data_parallel_size: size of the data axis.
        seed: decides the random orders.
        drop_last: drop the last samples of an epoch that do not fill a global batch; if shuffled, others each epoch.
        weights: a number of at least 0 for each sample; only their proportions matter. Samples are drawn by weight, in
            a random order; `shuffle` has no effect.
        num_samples: with weights, draws of an epoch; by default the number of samples of the dataset.
        replacement: with weights, whether an epoch may have a sample several times. If False, set `num_samples`.
        lanes: number of lanes that read shard file by shard file; by default the order ignores the shard files.
        block: with lanes, how many shard files a lane shuffles together; by default 4.

    Raises:
        ConfigError: An empty dataset, one smaller than a global batch with `drop_last`, malformed weights, or a size or
            rank out of range.
    """

    endless = True

    def __init__(
        self,
        dataset: Sized,
        micro_batch_size: int,
        shuffle: bool = False,
        consumed_samples: int = 0,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        seed: int = 0,
        drop_last: bool = False,
        weights: Any = None,
        num_samples: int | None = None,
        replacement: bool = True,
        lanes: int | None = None,
        block: int | None = None,
    ) -> None:
        check({"shuffle": FLAG, "drop_last": FLAG}, shuffle=shuffle, drop_last=drop_last)
        laned = laned_order(dataset, seed, shuffle, lanes, block, weights)
        drawn = drawn_order(dataset, seed, weights, num_samples, replacement) if laned is None else None
        order = drawn or order_over(dataset, seed, shuffle, laned)
        self._epoch_size = order.epoch_size
        self._blend = order.blend if isinstance(order, BlendOrder) else None
        super().__init__(dataset, micro_batch_size, order, data_parallel_rank, data_parallel_size, consumed_samples)
        if attribute_of(dataset, "is_stream_transform", False):
            if drop_last:
                raise ConfigError(f"drop_last: {_OF_TRANSFORMS}; set drop_last=False for the sampler")
            self._walk = Walk(dataset if isinstance(dataset, StreamTransform) else None, order)
        self.drop_last = drop_last
        self._skip_steps: Ranges = ()
        self._micro_batches: Mapping[int, int] = {}
        self._stretches: list[_Stretch] = [_Stretch(0, self.global_batch_size, 0)]
        self._starts = [0]
        self._set_weights_at_steps(StepSchedule(((0, self.global_batch_size),)), LeftOut())
        if drop_last:
            self._leave_out_tail(self.global_batch_size)

    def _leave_out_tail(self, batch_size: int) -> None:
        check_holds_a_batch(self._epoch_size, batch_size, self.data_parallel_size)
        self.order = replace(self.order, epoch_size=self._epoch_size // batch_size * batch_size)

    def follow(
        self, schedule: StepSchedule, skip_steps: Ranges = (), micro_batches: Mapping[int, int] | None = None
    ) -> None:
        """Cut the stream into the steps of a schedule. Call this before a state is restored.

        Args:
            skip_steps: (first step, last step), both included: the stream leaves out the samples that these steps would
                use in a run without any skip. The training still numbers its steps without a gap.
            micro_batches: global batch size -> number of batches that a step of this size is cut into; by default 1.

        Raises:
            ConfigError: A step cannot be cut into these batches; or sizes change with `drop_last`, whose tail depends
                on the size; or a stream transform, with steps to skip or with weights that change at steps.
        """
        micro_batches = dict(micro_batches or {})
        for step, size in schedule.sizes:
            count = micro_batches.get(size, 1)
            if size % (count * self.data_parallel_size):
                raise ConfigError(
                    f"the {size} samples of a step (from step {step} on) cannot be cut into {count} batches for "
                    f"{self.data_parallel_size} data-parallel ranks"
                )
        if self._walk is not None and skip_steps:
            raise ConfigError(f"train.skip_steps is {[list(steps) for steps in skip_steps]}: {_OF_TRANSFORMS}")
        if self.drop_last:
            if len(schedule.sizes) > 1:
                raise ConfigError(
                    f"drop_last leaves out a tail that depends on the global batch size, which changes: "
                    f"{list(schedule.sizes)}; set drop_last=False for the sampler"
                )
            self._leave_out_tail(schedule.sizes[0][1])
        self._followed = schedule
        self._skip_steps = skip_steps
        self._micro_batches = micro_batches
        left_out = left_out_by(skip_steps, schedule)
        self._set_weights_at_steps(schedule, left_out)
        self._continue_from(StreamState(self.position, self.order, left_out, schedule, self.state.start))

    def _set_weights_at_steps(self, schedule: StepSchedule, left_out: LeftOut) -> None:
        """If the weights of the blend change at steps, let them change at the places where these steps begin."""
        if self._blend is None or not self._blend.steps or not isinstance(self.order, BlendOrder):
            return
        if self._walk is not None:
            raise ConfigError(f"weights of a blend change at steps: {_OF_TRANSFORMS}; give positions, as `changes`")
        blend = self._blend.at_steps(lambda step: left_out.place_of(schedule.position_of(step)))
        self.order = replace(self.order, blend=blend)

    def load_state_dict(self, state: Mapping[str, Any], override: Collection[str] = ()) -> None:
        if self._followed is not None and self._blend is not None and self._blend.steps:
            # The steps before the state may have had other sizes than the following steps.
            saved = StreamState.from_json(state)
            schedule = continued_schedule(saved, self._followed)
            skipped = self._places_to_skip(schedule).since(saved.place)
            self._set_weights_at_steps(schedule, saved.left_out.joined(skipped))
        super().load_state_dict(state, override)

    def _places_to_skip(self, schedule: StepSchedule) -> LeftOut:
        return left_out_by(self._skip_steps, schedule)

    def take_over(self, other: StreamSampler) -> None:
        if isinstance(other, CyclicSampler):
            self._micro_batches = other._micro_batches
        super().take_over(other)

    def _continue_from(self, state: StreamState) -> None:
        super()._continue_from(state)
        self._stretches = [_Stretch(0, self.global_batch_size, 0)]
        schedule = state.schedule
        for (_, size), position in zip(schedule.sizes, schedule.positions) if schedule is not None else ():
            last = self._stretches[-1]
            number = last.number + -(-(position - last.position) // last.rows)
            # Only past steps may have sizes that do not fit this mesh. The sampler reads no batch of such a size.
            rows = size // self._micro_batches.get(size, 1)
            rows = rows if rows % self.data_parallel_size == 0 else self.global_batch_size
            self._stretches.append(_Stretch(position, rows, number))
        self._starts = [stretch.position for stretch in self._stretches]

    @property
    def consumed_samples(self) -> int:
        """Samples that all ranks together have used so far."""
        return self.position

    def set_consumed_samples(self, consumed_samples: int) -> None:
        """Continue after this many samples of all ranks together."""
        check({"consumed_samples": whole(0)}, consumed_samples=consumed_samples)
        self.position = int(consumed_samples)

    def set_epoch(self, epoch: int) -> None:
        """Continue at the beginning of this epoch."""
        place = self._place_of_epoch(epoch)
        if self._walk is not None and epoch:
            raise ConfigError(f"epoch {epoch}: {_OF_TRANSFORMS}")
        self.set_consumed_samples(place - self.left_out.count_before(place))

    def __len__(self) -> int:
        """Number of samples in the dataset, as in LiBai."""
        return self.order.size

    def batches_per_round(self) -> int:
        if self._walk is not None:
            raise TypeError("the number of batches in an epoch of a stream transform is not known in advance")
        return ceil(self.order.epoch_size / self.global_batch_size)

    def _counted_from(self, position: int) -> int:
        return self._stretches[bisect_right(self._starts, position) - 1].position

    def batch_at(self, position: int) -> IndexBatch | None:
        start, rows, first = self._stretches[bisect_right(self._starts, position) - 1]
        number = first + (position - start) // rows
        if self._walk is not None:
            return self._transformed_part(self._walk, position, rows, number)
        return self._part(position, rows, rows, number)

    def _transformed_part(self, walk: Walk, position: int, size: int, number: int) -> IndexBatch:
        first, count = self._first_of_turns(position, size), size * self._ranks_in_turn
        rows = position - first + self.rows_of(size)
        own = self.order.in_rows(first + np.arange(count)[None])[0][rows]
        turns = None
        if self.follows_own_lanes and isinstance(self.order, LaneOrder):
            # The lanes with outputs at these positions, or in this reader's rows of other batches.
            known = self.order.turns_of(range(int(rows[0]), int(rows[-1]) + 1), count)
            turns = sorted({*known, *(own % self.order.lanes).tolist()})
        firsts, end = walk.outputs(first, count, turns)
        # All ranks must return the same epoch, but ranks that measure lanes may not know the lane of the first sample.
        places, _ = place_and_offset(firsts)
        epoch = None if self.measures_lanes else int(places[position - first]) // self.order.epoch_size
        firsts, epochs = firsts[own - first], self.order.locate(places[own - first])[0]
        is_last_turn = position + size == first + count
        return IndexBatch(number, epoch, position, size, size, epochs, firsts, end if is_last_turn else None)
