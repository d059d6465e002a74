"""A sampler over a stream: it reads rows in the order of the stream, and selects the rows of this reader."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from libai_data.data.random.global_generators import warn_once
from libai_data.data.samplers.batch_runs import Run, rounded_up, runs_of
from libai_data.data.samplers.cursor import Cursor, EpochPositions, IndexBatch
from libai_data.data.samplers.resuming import allowing
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.errors import CheckpointError, ConfigError, SchemaError
from libai_data.errors.argument_rules import EPOCH
from libai_data.errors.saved_state import Keys, check_state
from libai_data.iterables.collation import is_whole_batch
from libai_data.iterables.iterable_source import Source
from libai_data.iterables.prefetcher import Flag
from libai_data.iterables.rows import Mark, Place, ReadingOptions, Row, RowReader
from libai_data.iterables.saved_place import STATE
from libai_data.structures import BatchInfo

_Key = tuple[int, int]

_PLACES_KEPT = 64  # more than the batches that are read, but not yet used by the trainer


class TakenRows:
    """The dataset of a loader over an iterable: returns the rows that the sampler has read, in its order."""

    seeds_generators = True  # A stream's own generators decide its order; digests show whether it replays.
    reads_once = True

    def __init__(self, source: Source, options: ReadingOptions) -> None:
        self.source = source
        self.options = options
        self.newest: list[Any] = []
        """The pieces of the newest batch."""

    def __len__(self) -> int:
        """0, because the number of rows is not known."""
        return 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """The pieces of the newest batch, to which `indices` belong; again for a collator that draws."""
        return [*self.newest]

    def __getitem__(self, index: int) -> Any:
        raise IndexError(
            f"{self.source.name} yields samples in its own order; sample {index} cannot be read by its index"
        )


class IterableStream(EpochPositions, StreamSampler):
    """Splits the rows of an iterable over the ranks: global batch k of size B is rows [kB, (k+1)B), and data-parallel
    rank d gets its d-th contiguous part. So neither mesh nor read mode changes a batch.

    A function with `shard` is opened once for each data-parallel rank instead, and rank d gets the rows of shard d.

    Args:
        rows: the dataset that receives the rows; None on a rank that does not read.
        micro_batch_size: rows of a batch for one data-parallel rank; with None, the batches of the iterable are global
            batches.
        shards: coordinates on the data axis that this reader reads for.
        ends: what happens to the last rows if they do not fill a global batch: "short", "pad", "drop" or "cycle".
        reading: other parameters that decide the rows, for the state; see `Sharding.words`.
        together: rows that a batch transform needs together; a short last batch has a multiple of them on each rank.
    """

    def __init__(
        self,
        rows: TakenRows | None,
        micro_batch_size: int | None,
        shards: tuple[int, ...],
        data_parallel_size: int,
        ends: str,
        reading: Mapping[str, int] | None = None,
        together: int = 1,
    ) -> None:
        # The base's __init__ is not called, because there is no order to compute.
        self.endless = ends == "cycle"
        self.ends = ends
        self._reading = {} if reading is None else {"reading": dict(reading)}
        self.shards = shards
        self.data_parallel_size = data_parallel_size
        self.cursor = Cursor()
        self._size = None if micro_batch_size is None else micro_batch_size * data_parallel_size
        self._keeps_batches = micro_batch_size is None
        self._shared_evenly = data_parallel_size * together
        self._rows = rows
        self._is_sharded = rows is not None and rows.source.takes_shard
        self._readers: list[RowReader] = []
        self._closed = Flag()
        if rows is not None:
            taken = shards if self._is_sharded else (0,)
            of = data_parallel_size if self._is_sharded else 1
            self._readers = [RowReader(rows.source, rows.options, shard, of) for shard in taken]
        # By (epoch, position), with epoch 0 for an endless stream: the current, the earlier and the restored places.
        self._current_key: _Key | None = None
        self._places: OrderedDict[_Key, tuple[Place, ...]] = OrderedDict()
        self._restored: tuple[_Key, dict[str, Any]] = ((0, 0), {})

    @property
    def global_batch_size(self) -> int | None:  # type: ignore[override]
        """Rows of a batch over all data-parallel ranks; None before the first batch is read."""
        return self._size

    def batches_per_round(self) -> int:
        raise TypeError("the number of batches that an iterable yields is unknown")

    def batch_runs(self) -> list[Run]:
        if self._rows is None or self.ends != "short":
            return []
        source = self._rows.source
        if self._keeps_batches:
            return [Run(batches, self._rows_for(rows)) for batches, rows in source.batch_runs]
        if source.batches or self._size is None:
            return []
        try:
            return runs_of(source.length(), self._size, self._rows_for)
        except Exception:  # Not every source has a length.
            return []

    def _rows_for(self, valid: int) -> int:
        return rounded_up(valid, self._shared_evenly) // self.data_parallel_size

    def next_pass(self) -> Cursor:
        return self.cursor if self.endless else super().next_pass()

    def after(self, batch: IndexBatch | BatchInfo) -> Cursor:
        return Cursor(batch.position + batch.size) if self.endless else super().after(batch)

    def set_epoch(self, epoch: int) -> None:
        if self.endless:
            raise ConfigError(
                f"set_epoch({epoch}): a stream with ends='cycle' has no epochs. Remove set_epoch, so that "
                "each loop continues after the last batch, or use ends='short'"
            )
        super().set_epoch(epoch)

    def batches(self, position: int) -> Iterator[IndexBatch]:
        """This reader's parts of all batches from `position` to the end of the cursor's epoch, or of the next one.

        Raises CheckpointError if the iterable does not reach this position; and as `RowReader.take`.
        """
        if self._closed.is_set:
            self._closed = Flag()
        return self._batches(position, self._closed)

    def _batches(self, position: int, closed: Flag) -> Iterator[IndexBatch]:
        epoch = self.cursor.epoch
        self._move_to((epoch, position), closed)
        batch = self._next_batch(position, epoch)
        if batch is None and position:
            epoch, position = epoch + 1, 0
            self._move_to((epoch, position), closed)
            batch = self._next_batch(position, epoch)
        while batch is not None:
            position += batch.valid
            self._places[epoch, position] = tuple(reader.place for reader in self._readers)
            while len(self._places) > _PLACES_KEPT:
                self._places.popitem(last=False)
            self._current_key = (epoch, position)
            yield batch
            # Until the next batch is complete, the place is unknown: reading may fail, or be interrupted.
            self._current_key = None
            batch = self._next_batch(position, epoch)

    def _move_to(self, key: _Key, closed: Flag) -> None:
        current_key, self._current_key = self._current_key, None
        epoch, position = key
        if position and key == current_key and all(reader.closed is closed for reader in self._readers):
            return
        if not position:
            places: tuple[Place, ...] = tuple(Place(epoch) for _ in self._readers)
        elif key in self._places:
            places = self._places[key]
        else:
            at, details = self._restored
            places = self._places_of(position, {"epoch": epoch, **(details if at == key else {})})
        for reader, place in zip(self._readers, places):
            reader.begin(place, (self._size or 1) // (self.data_parallel_size if self._is_sharded else 1), closed)
        if self._size is None:
            self._learn_size()

    def _places_of(self, position: int, restored: Mapping[str, Any]) -> tuple[Place, ...]:
        """The places of the readers in a restored state."""
        epoch = int(restored["epoch"])
        if not self._is_sharded and "row" in restored:
            kept = restored.get("source")
            mark = kept and Mark(int(kept["row"]), str(kept["state"]), str(kept.get("rows_digest", "")))
            return (Place(epoch, int(restored["row"]), str(restored.get("rows_digest", "")), mark),)
        # A state of a source without shards has the digest of the rows of its only shard.
        digests = restored.get("rows_digests") or {"0": restored.get("rows_digest", "")}
        rows, start = position // (self.data_parallel_size if self._is_sharded else 1), 0 if self.endless else epoch
        return tuple(
            Place(start, rows, str(digests.get(str(shard), ""))) for shard in self.shards[: len(self._readers)]
        )

    def _learn_size(self) -> None:
        if self._rows is None:
            raise RuntimeError("this rank reads nothing")
        rows = self._readers[0].first_rows()
        if rows % self.data_parallel_size:
            raise SchemaError(
                f"{self._rows.source.name} yields batches of {rows} rows, which cannot be shared by "
                f"{self.data_parallel_size} data-parallel ranks; change the size of the batches, or give "
                "micro_batch_size to cut the batches again"
            )
        if rows:
            self._size = rows

    def _next_batch(self, position: int, epoch: int) -> IndexBatch | None:
        if self._size is None or self._rows is None:
            return None
        first_epoch, rows, size, valid = (self._sharded_part if self._is_sharded else self._part_of_all)(self._size)
        if not rows:
            return None
        if self.endless:
            epoch = first_epoch
        self._rows.newest = [row.piece for row in rows]
        epochs = np.array([row.epoch for row in rows], dtype=np.int64)
        indices = np.array([row.number for row in rows], dtype=np.int64)
        return IndexBatch(position // self._size, epoch, position, size, valid, epochs, indices)

    def _part_of_all(self, size: int) -> tuple[int, list[Row], int, int]:
        """The next global batch: epoch of its first row, this reader's rows, number of all rows, number that count."""
        rows = self._readers[0].take(size)
        if not rows or (len(rows) < size and self.ends == "drop"):
            return 0, [], 0, 0
        first, last = rows[0].piece, rows[-1].piece
        if self._keeps_batches and self._rows is not None and not is_whole_batch(first, last, len(rows)):
            warn_once(
                f"{self._rows.source.name} yields batches of different sizes. The loader cuts them again, into batches "
                f"of {size} rows, as the first one. If each step must use one of its batches, make them equally large"
            )
        if self.ends == "short":
            size = min(size, rounded_up(len(rows), self._shared_evenly))
        micro = size // self.data_parallel_size
        own = [number for shard in self.shards for number in range(shard * micro, (shard + 1) * micro)]
        return rows[0].epoch, [rows[min(number, len(rows) - 1)] for number in own], size, len(rows)

    def _sharded_part(self, size: int) -> tuple[int, list[Row], int, int]:
        """As `_part_of_all`. Each shard cycles by itself, so the shards have no common epoch."""
        micro = size // self.data_parallel_size
        rows: list[Row] = []
        for shard, reader in zip(self.shards, self._readers):
            part = reader.take(micro)
            if len(part) < micro:
                return 0, [], 0, 0
            # Each number belongs to one shard only.
            rows += [Row(row.epoch, row.number * self.data_parallel_size + shard, row.piece) for row in part]
        return 0, rows, size, size

    def name_source(self, name: str) -> None:
        """Name the iterable in errors."""
        if self._rows is not None:
            self._rows.source.name = name

    def taken_rows(self) -> tuple[int, int, int]:
        """Numbers that are equal on all ranks that read the same rows: a digest of the last rows, and the epoch and row
        after them. All are 0 on a reader of several shards, which is not compared."""
        if len(self._readers) != 1:
            return 0, 0, 0
        reader = self._readers[0]
        return reader.taken_word, reader.place.epoch, reader.place.index

    @property
    def skipped(self) -> int:
        """The number of rows that could not be read, and were left out."""
        failures = None if self._rows is None else self._rows.options.failures
        return 0 if failures is None else failures.skipped

    def order_words(self) -> dict[str, Any]:
        """Parameters that must be equal in a state and in the stream that resumes from it."""
        return {"ends": self.ends, **self._reading}

    def state_dict(self) -> dict[str, Any]:
        """The number of rows that all ranks have used (in this epoch, if the stream is finite), and `ends`."""
        epoch = {} if self.endless else {"epoch": self.cursor.epoch}
        return {"position": self.position, **epoch, **self.order_words()}

    @property
    def state(self) -> None:  # type: ignore[override]
        """None, because there is no order to compute."""

    def take_over(self, other: StreamSampler) -> None:
        """Do nothing, because a pass sets the cursor, and there is no other state."""

    def load_state_dict(self, state: Mapping[str, Any], override: Collection[str] = ()) -> None:
        """Continue at the position of `state`. With the override "seed", shards and shuffling may differ."""
        check_state(state, STATE, "a loader over an iterable")
        if (state["ends"] == "cycle") != self.endless:
            raise CheckpointError(
                f"the data state was saved with ends={state['ends']}, which is now {self.ends}; an endless stream "
                "cannot continue from a state of epochs, or the reverse"
            )
        saved, own = state.get("reading"), self._reading.get("reading")
        if saved != own and "seed" not in override:
            raise CheckpointError(
                f"the data state was saved with {saved or 'no shards'}, which are now {own or 'no shards'}, so the "
                f"next rows would be others. Set the old values, or allow the difference: {allowing('seed')}"
            )
        if not self.endless:
            check_state(state, Keys({"epoch": EPOCH}, others=True), "a loader whose epochs end")
        self.cursor = Cursor(int(state["position"]), 0 if self.endless else int(state["epoch"]))

    def details(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """More about the position of a state, of this rank or another: epoch, row, digest, the iterable's state."""
        key = int(state.get("epoch", 0)), int(state["position"])
        if key == self._restored[0] and self._restored[1] and key not in self._places:
            return dict(self._restored[1])
        found: dict[str, Any] = {"epoch": key[0], "num_shards": 1}
        if self._size is not None:
            found["global_batch_size"] = self._size
        places = self._places.get(key) if key[1] else None
        if self._is_sharded:
            found["num_shards"] = self.data_parallel_size
            if places is not None:
                found["rows_digests"] = {str(shard): place.digest for shard, place in zip(self.shards, places)}
        elif places is not None:
            (place,) = places
            found.update(epoch=place.epoch, row=place.index, rows_digest=place.digest)
            if place.mark is not None:
                mark, length = place.mark, self._first_length
                found["source"] = {"row": mark.index, "state": mark.state, "rows_digest": mark.digest}
                found["source"].update({} if length is None else {"length": length})
        return found

    def check_details(self, details: Mapping[str, Any]) -> None:
        """Raise an error if this stream cannot restore `details`."""
        num_shards = self.data_parallel_size if self._is_sharded else 1
        if details.get("num_shards", 1) != num_shards:
            raise CheckpointError(
                f"the data state was saved with {details['num_shards']} shard(s), but there are {num_shards} now; a "
                "function with shard can resume only on as many data-parallel ranks as before"
            )
        saved, length = details.get("source", {}).get("length"), self._first_length
        if self._rows is not None and None not in (saved, length) and saved != length:
            raise CheckpointError(
                f"{self._rows.source.name} had a length of {saved} when its state was saved, and now has {length}. The "
                "rows before the state are not read again, so nobody knows whether the state fits the changed data. "
                f"Use the same data, or allow the difference: {allowing('dataset')}"
            )
        size = int(details.get("global_batch_size", 0))
        if self._size is None and size % self.data_parallel_size:
            raise ConfigError(
                f"batches of {size} rows cannot be shared by {self.data_parallel_size} data-parallel ranks"
            )

    def restore(self, state: Mapping[str, Any], details: Mapping[str, Any]) -> None:
        """Restore what `details` returned for a state, for the next pass; see `check_details`."""
        if self._size is None and details.get("global_batch_size"):
            self._size = int(details["global_batch_size"])
        self._current_key = None
        self._places.clear()
        self._restored = (int(state.get("epoch", 0)), int(state["position"])), dict(details)

    @property
    def _first_length(self) -> int | None:
        return None if self._rows is None else self._rows.source.first_length

    def close(self) -> None:
        """Stop the prefetching. A thread that waits for a batch gets a `PassError`."""
        self._closed.is_set = True
        # The source is closed before the readers, because their threads may wait for the threads that read shards.
        if self._rows is not None:
            self._rows.source.close()
        for reader in self._readers:
            reader.close()
