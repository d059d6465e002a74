"""Functions, filters and packers of streams, which need no length and scan nothing in advance."""

from __future__ import annotations

import json
import operator
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Callable

import numpy as np

from libai_data.data.attributes import attribute_of
from libai_data.data.datasets.packing import PackedDataset
from libai_data.data.datasets.stream_transform import start_of
from libai_data.errors import CheckpointError, ConfigError, SampleError
from libai_data.errors.argument_rules import FUNCTION, check
from libai_data.iterables.failed_rows import FailedRow, Skipping
from libai_data.iterables.iterable_source import Source
from libai_data.iterables.kinds import is_map_style
from libai_data.iterables.plain_state import saved_in
from libai_data.iterables.shared_use import Opened, SaveState

_END = object()


class _Stage:
    """A stream that changes the rows of its source."""

    source: Any

    def __init_subclass__(cls) -> None:
        if "__iter__" in vars(cls):
            raise TypeError(
                f"{cls.__name__} has an __iter__ of its own, but a loader reads a {cls.__mro__[1].__name__} without "
                "calling __iter__; change the rows by MappedStream, FilteredStream or PackedStream, or do not derive "
                "the class from these"
            )

    def __iter__(self) -> Iterator[Any]:
        return source_of(self).open(0, 0, 1)[0]

    def inner_state(self, state: str) -> str:
        """The state of the source, from a state of this stage; both are the same if each row makes at most one row."""
        return state

    def rows(self, rows: Iterator[Any], save: SaveState | None, state: str | None) -> Opened:
        """The changed rows, and a function that saves their state; None if the source has no state."""
        raise NotImplementedError


class MappedStream(_Stage):
    """Applies a function to each sample of a stream. The result is a stream too, for `DataLoader` and `from_iterable`.

    With `on_error="skip"` the loader leaves out samples for which the function fails.

    Args:
        source: see `FilteredStream`.
        function: from a sample to a sample, for example a decoder.

    Raises:
        ConfigError: The source has a length and an index (use `Map`), or `function` is not callable.
    """

    def __init__(self, source: Any, function: Callable[[Any], Any]) -> None:
        check({"function": FUNCTION}, function=function)
        self.source, self._function = _stream(source, "Map"), function

    def rows(self, rows: Iterator[Any], save: SaveState | None, state: str | None) -> Opened:
        return map(_applied(self._function, to_failed=lambda row: row), rows), save


class FilteredStream(_Stage):
    """Skips samples of a stream. The result is a stream too, for `DataLoader` and `from_iterable`.

    Args:
        source: whatever `from_iterable` reads as a stream of samples: a generator function, a function with `shard`
            and `num_shards`, an iterable, another filter.
        keep: a function of a sample that returns whether to keep it.

    Raises:
        ConfigError: The source has a length and an index (use `FilteredDataset`), or `keep` is not callable.
    """

    def __init__(self, source: Any, keep: Callable[[Any], bool]) -> None:
        check({"keep": FUNCTION}, keep=keep)
        self.source, self._keep = _stream(source, "FilteredDataset"), keep

    def rows(self, rows: Iterator[Any], save: SaveState | None, state: str | None) -> Opened:
        return filter(_applied(self._keep, to_failed=lambda row: True), rows), save


def _applied(function: Callable[[Any], Any], to_failed: Callable[[FailedRow], Any]) -> Callable[[Any], Any]:
    """A function of a row that calls `function`, or `to_failed` for a row that could not be read."""

    def call(row: Any) -> Any:
        if isinstance(row, FailedRow):
            return to_failed(row)
        try:
            return function(row)
        except StopIteration as error:  # It would end the epoch silently.
            name = attribute_of(function, "__qualname__", type(function).__name__)
            raise SampleError(f"{name} raised StopIteration, for example by next() of an empty iterator") from error

    return call


class PackedStream(_Stage):
    """Packs the samples of a stream into sequences of one length. The result is a stream too.

    Samples are packed in the order of the stream; with `window`, by best fit among that many consecutive samples. An
    epoch of the stream is an epoch of the sequences, and its last sequence is padded. With `num_shards`, each shard is
    packed separately.

    Args:
        source: see `FilteredStream`. Its samples are dicts, Instances or named tuples.
        length: length of a packed sequence, in tokens.
        **options: `cut`, `truncate`, `padding`, `segments`, `positions` and `window` of `PackedDataset`.

    Raises:
        ConfigError: The source has a length and an index (use `PackedDataset`), or an argument is out of range.
    """

    def __init__(self, source: Any, length: int, **options: Any) -> None:
        for name in ("lengths", "keep"):
            if name in options:
                raise ConfigError(
                    f"PackedStream has no argument '{name}': it measures each sample when it reads the sample, and "
                    "packs all samples; filter with FilteredStream"
                )
        self.source, self._options = _stream(source, "PackedDataset"), {"length": length, **options}
        self._packer()

    def _packer(self) -> PackedDataset:
        packer = PackedDataset(_Pending(), **self._options)
        packer.follow_order(packer.dataset, in_rounds=True)
        return packer

    def inner_state(self, state: str) -> str:
        with saved_in(state) as saved:
            return json.dumps(saved["source"])

    def rows(self, rows: Iterator[Any], save: SaveState | None, state: str | None) -> Opened:
        packing = _Packing(self._packer(), rows, save, state)
        return packing, None if save is None else packing.state


class _Pending:
    """A dataset of the samples that wait to be packed, and their order. An index is the number in the stream."""

    seed = 0
    lanes = 1

    def __init__(self) -> None:
        self.first = 0
        self.rows: deque[Any] = deque()

    def __len__(self) -> int:
        return self.first + len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index - self.first]

    @property
    def epoch_size(self) -> int:
        return len(self)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        there = positions[positions < len(self)]
        return np.zeros_like(there), there


class _Packing:
    """Reads samples until a sequence, or a window, is full. The rest of the samples begins the next one.

    The state has a state of the source, the number of samples to skip from there, and how much of the next ones was
    used: tokens of the sample, or sequences of the window. The state of the source may be older than the next sample.
    """

    def __init__(self, packer: PackedDataset, rows: Iterator[Any], save: SaveState | None, state: str | None) -> None:
        self._packer, self._samples, self._rows, self._save = packer, packer.dataset, rows, save
        self._lengths: list[int] = []
        self._marks: deque[tuple[int, str | None]] = deque()
        self._offset = 0
        self._has_ended = False
        self._packing = [packer.units, packer.cuts, packer.window]
        if state is not None:
            with saved_in(state) as saved:
                packing = saved["packing"]
                skipped, self._offset = operator.index(saved["skip"]), operator.index(saved["offset"])
                self._marks.append((-skipped, json.dumps(saved["source"])))
            if packing != self._packing:
                raise CheckpointError(
                    f"the data state was saved with [length, cut, window] {packing} of PackedStream, which are now "
                    f"{self._packing}, so the next sequences would be others. Set the old values"
                )
            for _ in islice((row for row in rows if not isinstance(row, FailedRow)), skipped):
                pass

    def __iter__(self) -> _Packing:
        return self

    def __next__(self) -> Any:
        return self._next_of_window() if self._packer.window else self._next_in_order()

    def _next_of_window(self) -> Any:
        samples, packed = self._samples, None
        while packed is None:
            if len(samples.rows) < self._packer.window:
                self._mark()
            while len(samples.rows) < self._packer.window and (row := self._read()) is not _END:
                if isinstance(row, FailedRow):
                    return row
            if not samples.rows:
                raise StopIteration
            outputs = len(self._packer.window_at(samples.first).outputs)
            if self._offset < outputs:
                packed = self._packer[start_of(samples.first, self._offset)]
                self._offset += 1
            if self._offset >= outputs:
                self._offset = 0
                self._forget(len(samples.rows))
        return packed

    def _next_in_order(self) -> Any:
        room = self._packer.units
        waiting = sum(self._lengths) - self._offset
        if waiting < room:
            self._mark()
        while waiting < room and (row := self._read()) is not _END:
            if isinstance(row, FailedRow):
                return row
            self._lengths.append(self._packer.measured(row))
            waiting += self._lengths[-1]
        if not waiting:
            raise StopIteration
        packed = self._packer[start_of(self._samples.first, self._offset)]
        used, done = self._offset, 0
        while done < len(self._lengths) and self._lengths[done] - used <= room:
            room -= self._lengths[done] - used
            used, done = 0, done + 1
        self._offset = used + room if self._packer.cuts and done < len(self._lengths) else 0
        del self._lengths[:done]
        self._forget(done)
        return packed

    def _mark(self) -> None:
        # At the end, the state of many iterables is that of the beginning, from which a resume would repeat the epoch.
        if self._save is not None and not self._has_ended:
            self._marks.append((len(self._samples), self._save()))

    def _read(self) -> Any:
        row = next(self._rows, _END)
        self._has_ended = row is _END
        if row is not _END and not isinstance(row, FailedRow):
            self._samples.rows.append(row)
        return row

    def _forget(self, done: int) -> None:
        for _ in range(done):
            self._samples.rows.popleft()
        self._samples.first += done
        while len(self._marks) > 1 and self._marks[1][0] <= self._samples.first:
            self._marks.popleft()

    def state(self) -> str | None:
        """Where the next sequence begins, as JSON text; None if the source has no state."""
        row, source = self._marks[0] if self._marks else (0, None)
        if source is None:
            return None
        place = {"skip": self._samples.first - row, "offset": self._offset, "packing": self._packing}
        return json.dumps({"source": json.loads(source), **place})


class WrappedSource(Source):
    """A source that changes the rows of another source."""

    def __init__(self, inner: Source) -> None:
        self.inner = inner
        self.name, self.batches, self.batch_runs = inner.name, inner.batches, inner.batch_runs
        self.takes_shard, self.first_length = inner.takes_shard, inner.first_length
        self.knows_epoch = inner.knows_epoch

    def reopens(self, epoch: int) -> bool:
        return False  # Only the state shows with which parameters the rows were changed.

    def length(self) -> int:
        return self.inner.length()

    def rounds_to_replay(self, epoch: int) -> int:
        return self.inner.rounds_to_replay(epoch)

    def close(self) -> None:
        self.inner.close()


class _StagedSource(WrappedSource):
    """A source with a function, a filter or a packer."""

    def __init__(self, stage: _Stage, batches: bool | None, skips: bool) -> None:
        super().__init__(source_of(stage.source, skips=skips))
        if self.batches or batches:
            raise ConfigError(
                f"a {type(stage).__name__} reads and yields samples, not batches; give the loader a batch size, and "
                "the stream a source of samples"
            )
        self._stage = stage
        self._skips = skips and not isinstance(stage, PackedStream)

    def length(self) -> int:
        if isinstance(self._stage, MappedStream):
            return self.inner.length()
        raise TypeError(f"the number of batches in an epoch of a {type(self._stage).__name__} is not known in advance")

    def open(self, epoch: int, shard: int, num_shards: int, state: str | None = None) -> Opened:
        rows, save = self.inner.open(epoch, shard, num_shards, state and self._stage.inner_state(state))
        rows, save = self._stage.rows(rows, save, state)
        return Skipping(rows, self.name) if self._skips else rows, save


def source_of(thing: Any, batches: bool | None = None, skips: bool = False) -> Source:
    """Make the `Source` of an iterable, with its functions, filters and packers; a ConfigError if it cannot be one."""
    if isinstance(thing, _Stage):
        return _StagedSource(thing, batches, skips)
    return Source(thing, batches, skips)


def _stream(source: Any, instead: str) -> Any:
    if is_map_style(source):
        raise ConfigError(
            f"{type(source).__name__} has a length and gives samples by their index; use {instead}, which can be "
            "shuffled and resumes without reading"
        )
    return source
