"""The base of loaders that resume at a position of their stream."""

from __future__ import annotations

import json
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from libai_data.data.samplers.batch_runs import Run
from libai_data.data.samplers.schedule import Ranges, StepSchedule
from libai_data.data.samplers.walk import UNKNOWN, different_starts
from libai_data.errors import ConfigError, ContractError, by_rank
from libai_data.launch.job_environment import warn_of_mistyped_variables
from libai_data.loader.iteration import Pass
from libai_data.loader.one_thread import OneThread
from libai_data.loader.same_dataset import restore_stream
from libai_data.mesh.current import get_data_parallel_size
from libai_data.mesh.peers.liveness import begin_collective


class NumpyBatches:
    """A loader whose batches contain numpy arrays; each `iter` is a pass over the loader.

    Args:
        loader: any loader of this package. These batches also move its position in the stream, and so its state. Its
            methods and attributes are also those of this object.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Pass:
        begun: Pass = self.loader.begin_pass(as_numpy=True)
        return begun

    def __len__(self) -> int:
        return len(self.loader)

    def __bool__(self) -> bool:
        return True  # `OfOneProcess` explains this.

    def __getattr__(self, name: str) -> Any:
        """Attributes of the loader, such as `state_dict`, `set_epoch`, `batch_size` and `close`."""
        if name.startswith("_") or name == "loader":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.loader, name)


_FIXED = {
    *("dataset", "sampler", "batch_sampler", "drop_last", "collate_fn", "num_workers", "timeout", "worker_init_fn"),
    *("generator", "prefetch_factor", "multiprocessing_context", "seed", "stream"),
}


class OfOneProcess:
    """Base of loaders: a loader reads in one process, with threads, workers and memory of its own."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and self.__dict__.get(name, value) is not value:
            raise ConfigError(f"the {name} of a loader cannot be changed; make another loader")
        super().__setattr__(name, value)

    _begun_in = 0
    """Id of the process that has begun to read; 0 if none has."""
    global_batch_size: Any

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch of one data-parallel rank; None if `global_batch_size` is None."""
        size = self.global_batch_size
        return None if size is None else size // get_data_parallel_size()

    @property
    def one_thread(self) -> OneThread:
        """For a block that moves the loader."""
        return self.__dict__.setdefault("_one_thread", OneThread())

    def new_pass(self, as_numpy: bool = False) -> Pass:
        """Make a pass from the position in the stream, without beginning it; an older pass ends. See `numpy`."""
        raise NotImplementedError

    def begin_pass(self, as_numpy: bool = False) -> Pass:
        """Make a pass, and begin it, so that the stream's cursor is at its first batch; see `new_pass`."""
        warn_of_mistyped_variables()
        one_thread = self.one_thread
        one_thread.begin()
        try:
            begun = self.new_pass(as_numpy)
            # In one line, as in `Pass`: a pass that an interrupt began for nobody would skip an epoch.
            one_thread.users, begun.stream.cursor = {}, begun.first; return begun  # noqa: E702  # fmt: skip
        except BaseException:
            one_thread.users = {}
            raise

    def __iter__(self) -> Pass:
        return self.begin_pass()

    def numpy(self) -> NumpyBatches:
        """The same batches as numpy arrays; a process that is no rank of a job never imports OneFlow for them."""
        return NumpyBatches(self)

    def __bool__(self) -> bool:
        # Without this, `bool(loader)` would be by its length, which may be unknown.
        return True

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a loader cannot be copied or pickled; make another loader, and call its load_state_dict with the "
            "state_dict() of this one"
        )


class ResumableLoader(OfOneProcess):
    """A loader that can resume at any position of its stream."""

    stream: Any  # the sampler
    fingerprint: Any  # the dataset's entry in the state

    def _break_off(self, why: str) -> None:
        """End the newest pass; its iterator raises `why` from now on."""
        raise NotImplementedError

    def __len__(self) -> int:
        """The number of batches of an epoch; rounded up if the stream is endless."""
        return int(self.stream.batches_per_round())

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a batch over all data-parallel ranks; None with a user's own sampler."""
        size: int | None = self.stream.global_batch_size
        return size

    @property
    def endless(self) -> bool:
        """Whether a pass has no end; otherwise each pass is an epoch."""
        return bool(self.stream.endless)

    def batch_runs(self) -> list[Run]:
        """The batches of an epoch, if they may have different sizes, and these are known in advance; else empty."""
        runs: list[Run] = self.stream.batch_runs()
        return runs

    def follow(
        self, schedule: StepSchedule, skip_steps: Ranges = (), micro_batches: Mapping[int, int] | None = None
    ) -> None:
        """Cut the stream into the steps of a schedule, before the first batch; see `CyclicSampler.follow`."""
        if not hasattr(self.stream, "follow"):
            raise ConfigError(
                f"a {type(self.stream).__name__} has no endless stream that could follow steps of "
                f"{schedule.sizes[0][1]} samples; use CyclicSampler for training"
            )
        self.stream.follow(schedule, skip_steps, micro_batches)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was used, as JSON. Batches that were only read ahead do not count.

        The state is the same on all ranks. If each rank measures the samples of its own lanes, the ranks exchange their
        parts of the state (see `StreamSampler.follows_own_lanes`). Then call it on all ranks, after the same batch.

        Raises:
            ContractError: The ranks exchange their parts of the state after different batches.
        """
        self.exchange_starts()
        return {**self.stream.state_dict(), "dataset": self.fingerprint}

    def exchange_starts(self, words: Any = None) -> dict[int, Any]:
        """Exchange between all ranks where the next output of each lane begins, if each rank knows its own lanes only.

        Then it is collective. Otherwise nothing happens.

        Args:
            words: for all ranks, as JSON.

        Returns:
            The words of each rank; nothing without an exchange.

        Raises:
            ContractError: The ranks call it after different batches, or differ in the start of a lane.
        """
        if not getattr(self.stream, "follows_own_lanes", False):
            return {}
        state = self.stream.state
        own = list(self.stream.own_starts.items())
        told = begin_collective("the state of a filter or packer in lanes", json.dumps([state.position, own, words]))
        found = {rank: json.loads(each) for rank, each in told.items()}
        if not found:  # One process plays a rank of a mesh.
            return {}
        if len({position for position, _, _ in found.values()}) > 1:
            raise ContractError(
                "the ranks exchange the states of their loaders at different positions: "
                f"{by_rank({rank: str(position) for rank, (position, _, _) in found.items()})}; call state_dict() on "
                "all ranks after the same batch"
            )
        starts = np.full((len(found), state.order.lanes), UNKNOWN)
        for rank, (_, own, _) in found.items():
            for lane, start in own:
                starts[rank, lane] = start
        if differs := different_starts(starts):
            raise ContractError(f"the ranks exchange the states of their loaders, but {differs}")
        self.stream.note_start(state.position, tuple(starts.max(axis=0).tolist()))
        return {rank: each for rank, (_, _, each) in found.items()}

    def load_state_dict(self, state: Mapping[str, Any], override: Collection[str] = ()) -> None:
        """Continue where `state` was saved, with the next `iter(loader)`; all ranks must load the same state.

        Args:
            state: the `state_dict()` of a loader.
            override: what may differ on purpose; see `OVERRIDES` of the samplers.

        Raises:
            CheckpointError: The state belongs to another dataset or stream; the message shows both values.
        """
        with self.one_thread:
            restore_stream(self.stream, self.fingerprint, state, override)
            self._break_off("a state was restored, which the next iter(loader) begins with")

    def set_epoch(self, epoch: int) -> None:
        """Begin the next `iter(loader)` with this epoch, instead of the next one. Call it on all ranks."""
        with self.one_thread:
            self.stream.set_epoch(epoch)
            self._break_off("an epoch was set, which the next iter(loader) begins with")


def finish(finalizer: weakref.finalize) -> None:
    """Run a finalizer now. If a Ctrl-C interrupts it, it can run again."""
    alive = finalizer.peek()
    if alive is not None:
        _, function, arguments, named = alive
        function(*arguments, **(named or {}))
        finalizer.detach()
