"""The loader over an iterable, with which all ranks take the same number of steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Callable

import numpy as np

from libai_data.data.attributes import attribute_of
from libai_data.data.items import ArgumentNames
from libai_data.data.samplers.batch_runs import Run
from libai_data.data.samplers.cursor import Cursor
from libai_data.delivery.contract import ranks_by_shard
from libai_data.delivery.gather import gather_words
from libai_data.errors import ContractError, PeerError
from libai_data.errors.saved_state import check_state
from libai_data.iterables.saved_place import STATE, check_place
from libai_data.iterables.stream import IterableStream
from libai_data.loader.iteration import Pass, Take, refuse_in_fork
from libai_data.loader.resumable import OfOneProcess
from libai_data.mesh.current import get_mesh
from libai_data.structures import Instance

logger = logging.getLogger(__name__)

_FAILED, _ENDED, _HAS_BATCH = -1, 0, 1


@dataclass(frozen=True)
class SourceSummary:
    """What all ranks must know about the source."""

    is_map_style: bool = False
    name: str = ""  # for error messages
    dataset_name: str = ""  # of the dataset that it reads; evaluations list their results under this name
    batches: bool = False
    takes_shard: bool = False  # the shards of the ranks may have different lengths; an epoch ends with the shortest one
    is_shuffled: bool = False
    length: int | None = None
    has_short_batch: bool = False  # its last batch is known to be shorter than the others


class IterableLoader(OfOneProcess):
    """Iterates over batches of an iterable, each an Instance of OneFlow tensors [rows of this rank, ...].

    It has the methods of `DataLoader`. `iter` and `next` are collective: the ranks check that all have a batch, so that
    all take the same number of steps.

    Args:
        inner: `DataLoader` or `SharedLoader` over the rows.
        stream: the sampler of the rows that this rank reads; None if another rank reads for it.
        names: names of the fields of samples.
        summary: what is known of the iterable.
        reading_ranks: number of ranks that read the iterable.
        count: returns the number of batches of an epoch, computed from the length of the iterable.
    """

    def __init__(
        self,
        inner: Any,
        stream: IterableStream | None,
        names: Sequence[str] | None,
        summary: SourceSummary,
        reading_ranks: int,
        count: Callable[[], int],
    ) -> None:
        self._inner = inner
        self._stream = stream
        self._names = names
        self._name, self.dataset_name = summary.name, summary.dataset_name
        self._compares = reading_ranks > 1
        self.takes_shard = summary.takes_shard
        self._count = count
        self._expected: int | None = None
        self.mixup_func = inner.mixup_func

    def name_source(self, name: str) -> None:
        """Use `name` for the iterable in error messages, instead of the name of its class."""
        self._name = name
        if self._stream is not None:
            self._stream.name_source(name)

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a batch over all data-parallel ranks; None before the first batch is read."""
        return self._inner.global_batch_size

    @property
    def endless(self) -> bool:
        """Whether a pass has no end; otherwise each pass is an epoch."""
        return bool(self._inner.endless)

    def __len__(self) -> int:
        """The number of batches of an epoch, rounded up for endless streams; a TypeError if this is not known."""
        self._expected = self._count()
        return self._expected

    def batch_runs(self) -> list[Run]:
        """As for `DataLoader`; on a rank that reads."""
        return [] if self._stream is None else self._stream.batch_runs()

    def new_pass(self, as_numpy: bool = False) -> Pass:
        """Make a pass that continues the stream; `begun` begins it. With `as_numpy`, its batches are numpy arrays."""
        self._begun_in = self._begun_in or os.getpid()
        refuse_in_fork(self._begun_in, "this loader")
        inner = self._inner.new_pass(as_numpy)
        return Pass(inner.stream, inner.first, partial(self._take, inner.take, count()), self.one_thread)

    def _take(self, take: Take, numbers: Iterator[int]) -> tuple[Instance, Cursor] | None:
        """The next batch of a pass; None at its end, on all ranks together. If one rank fails, all do."""
        taken: tuple[Instance, Cursor] | None = None
        failure: Exception | None = None
        try:
            taken = take()
        except Exception as error:
            failure = error
        try:
            if self._compares and not self._all_have_one(taken is not None, failure is not None):
                taken = None
        except Exception as error:
            failure = failure or error
        if failure is not None:
            raise failure
        before = next(numbers)
        if taken is None and not before:
            logger.warning("%s yields no batch: it is empty, or ends='drop' leaves out all of its rows.", self._name)
        if taken is not None and before == self._expected and not self.endless:
            logger.warning("%s yields more batches than len(loader), which is %d.", self._name, self._expected)
        if taken is not None and isinstance(self._names, ArgumentNames):
            taken[0]._unnamed = self._names.given_to
        return taken

    def _all_have_one(self, has_one: bool, has_failed: bool) -> bool:
        """Compare with all other ranks; returns whether each rank has a batch."""
        status = _FAILED if has_failed else _HAS_BATCH if has_one else _ENDED
        taken = self._stream.taken_rows() if self._stream is not None else (0, 0, 0)
        table = gather_words(np.array([status, *taken], dtype=np.int64))
        failed = _ranks(table[:, 0] == _FAILED)
        if failed:
            raise PeerError(f"rank(s) {failed} could not read {self._name}; see their output")
        ended = _ranks(table[:, 0] == _ENDED)
        if 0 < len(ended) < len(table) and not self.takes_shard:
            raise ContractError(
                f"{self._name} has ended on rank(s) {ended}, but continues on the other ranks. It must yield the same "
                "rows on each rank that reads it; or let one rank read it: readers='rank0'"
            )
        for ranks in ranks_by_shard(get_mesh()).values() if self.takes_shard else [range(len(table))]:
            self._compare_rows(table[:, 1:], [rank for rank in ranks if table[rank, 1]])
        return not ended

    def _compare_rows(self, taken: np.ndarray, readers: list[int]) -> None:
        """Raise an error if ranks that read the same stream have different rows for this batch."""
        odd = [rank for rank in readers if taken[rank, 0] != taken[readers[0], 0]]
        if not odd:
            return
        last = f"{self.global_batch_size} rows" if self.global_batch_size else "rows"
        places = dict.fromkeys(f"row {taken[rank, 2]} of epoch {taken[rank, 1]}" for rank in (readers[0], odd[0]))
        raise ContractError(
            f"{self._name} yields other samples on rank(s) {odd} than on rank {readers[0]}, among the last {last} "
            f"before {' or '.join(places)}. Use the same seeds for shuffling and random transforms on all ranks, do "
            "not shard by rank (the loader does this), and raise an error instead of skipping bad samples; or use "
            "readers='rank0'"
        )

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was used, as JSON.

        On a rank that reads, the state also has the epoch, the row, a digest of the rows so far, and the state of the
        iterable if it has one. A checkpoint stores the state of rank 0, which always reads.
        """
        state: dict[str, Any] = dict(self._inner.state_dict())
        if self._stream is not None:
            state["iterable"] = self._stream.details(state)
        return state

    def load_state_dict(self, state: Mapping[str, Any], override: Collection[str] = ()) -> None:
        """Continue where `state` was saved, with the next `iter(loader)`. All ranks must restore the same state.

        Args:
            state: what `state_dict` of a loader over this iterable returned.
            override: what may differ on purpose; see `OVERRIDES` of the samplers. With "seed", the rows before the
                restored position may have changed.

        Raises:
            CheckpointError: The state belongs to another kind of stream, or contradicts itself.
        """
        check_state(state, STATE, "a loader over an iterable")
        check_place(state)
        details = state.get("iterable", {})
        if "seed" in override:
            details = {name: value for name, value in details.items() if not name.startswith("rows_digest")}
            if self._stream is not None and state.get("reading") != self._stream.order_words().get("reading"):
                details.pop("source", None)  # This state is of other shards, or of another shuffle buffer.
        if "dataset" in override and "source" in details:
            kept = {name: value for name, value in details["source"].items() if name != "length"}
            details = {**details, "source": kept}
        rest = {name: value for name, value in state.items() if name != "iterable"}
        if "epoch" in details and state.get("ends") != "cycle":
            rest.setdefault("epoch", details["epoch"])
        # At position 0 there is no row to restore.
        stream = self._stream if rest.get("position") else None
        if stream is not None:
            stream.check_details(details)
        with self.one_thread:
            self._inner.load_state_dict(rest, override)
            # Last, because a state that was refused must change nothing.
            if stream is not None:
                stream.restore(rest, details)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next `iter(loader)` with this epoch. Call it on all ranks."""
        with self.one_thread:
            self._inner.set_epoch(epoch)

    def stats(self) -> dict[str, Any]:
        """On a rank that reads: how the time was spent, and how many rows failed. Empty on other ranks."""
        stats: dict[str, Any] = self._inner.stats()
        return stats if self._stream is None else {**stats, "skipped_samples": self._stream.skipped}

    def close(self) -> None:
        """Stop reading ahead. Batches that are in use stay valid."""
        # First the pass, so that no other thread goes on with it when the stream has closed.
        self._inner.close()
        if self._stream is not None:
            self._stream.close()


def indexed_dataset_of(loader: Any) -> Any:
    """The dataset that a loader reads by index; None if the loader reads an iterable, or has no dataset."""
    return None if isinstance(loader, IterableLoader) else attribute_of(loader, "dataset")


def _ranks(chosen: np.ndarray) -> list[int]:
    return [int(rank) for rank in np.flatnonzero(chosen)]
