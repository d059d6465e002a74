"""Filters and packers of streams: no length is needed, and nothing is scanned."""

from __future__ import annotations

import json
import operator
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Callable, Protocol

import numpy as np

from libai_data.data.datasets.packing import PackedDataset
from libai_data.data.datasets.stream_transform import start_of
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import FUNCTION, check
from libai_data.iterables.iterable_source import Opened, SaveState, Source
from libai_data.iterables.kinds import is_map_style
from libai_data.iterables.plain_state import saved_in

_END = object()


class _Stage(Protocol):
    """What changes the rows of a stream."""

    source: Any

    def inner_state(self, state: str) -> str:
        """The state of the source, within a state of this stage."""

    def rows(self, rows: Iterator[Any], save: SaveState | None, state: str | None) -> Opened:
        """The changed rows, and a function that saves their state; None if the source has no state."""


class FilteredStream:
    """The samples of a stream that are kept; itself a stream, for `DataLoader` and `from_iterable`.

    Args:
        source: whatever `from_iterable` reads as a stream of samples: a generator function, a function with `shard`
            and `num_shards`, an iterable, another filter.
        keep: a function from a sample to whether it is kept.

    Raises:
        ConfigError: The source has a length and an index (use `FilteredDataset`), or `keep` is no function.
    """

    def __init__(self, source: Any, keep: Callable[[Any], bool]) -> None:
        check({"keep": FUNCTION}, keep=keep)
        self.source, self._keep = _stream(source, "FilteredDataset"), keep

    def __iter__(self) -> Iterator[Any]:
        return source_of(self).open(0, 0, 1)[0]

    def inner_state(self, state: str) -> str:
        return state

    def rows(self, rows: Iterator[Any], save: SaveState | None, state: str | None) -> Opened:
        return filter(self._keep, rows), save


class PackedStream:
    """Packs the samples of a stream into sequences of one length; itself a stream.

    Samples are packed in the order of the stream. An epoch of the stream is an epoch of the sequences, and its last
    sequence is padded. With `num_shards`, each shard is packed by itself.

    Args:
        source: see `FilteredStream`. Its samples are dicts, Instances or named tuples.
        length: of a packed sequence, in tokens.
        **options: `cut`, `truncate`, `padding`, `segments` and `positions` of `PackedDataset`. Without `cut`, a
            sequence ends with the last sample that fits.

    Raises:
        ConfigError: The source has a length and an index (use `PackedDataset`), or an argument is out of range.
    """

    def __init__(self, source: Any, length: int, **options: Any) -> None:
        for name in ("lengths", "keep", "window"):
            if name in options:
                raise ConfigError(f"PackedStream has no argument '{name}': it packs samples in the order of the stream")
        self.source, self._options = _stream(source, "PackedDataset"), {"length": length, "window": 0, **options}
        self._packer(_Waiting())

    def _packer(self, samples: _Waiting) -> PackedDataset:
        packer = PackedDataset(samples, **self._options)
        packer.follow_order(_AsTheyCome(samples), in_rounds=True)
        return packer

    def __iter__(self) -> Iterator[Any]:
        return source_of(self).open(0, 0, 1)[0]

    def inner_state(self, state: str) -> str:
        with saved_in(state) as saved:
            return json.dumps(saved["source"])

    def rows(self, rows: Iterator[Any], save: SaveState | None, state: str | None) -> Opened:
        samples = _Waiting()
        packing = _Packing(self._packer(samples), samples, rows, save, state)
        return packing, None if save is None else packing.state


class _Waiting:
    """The samples that wait to be packed, as a dataset: their indices are their numbers in the stream."""

    def __init__(self) -> None:
        self.first = 0
        self.rows: deque[Any] = deque()

    def __len__(self) -> int:
        return self.first + len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index - self.first]


class _AsTheyCome:
    """The order of the samples that wait to be packed."""

    seed = 0

    def __init__(self, samples: _Waiting) -> None:
        self._samples = samples

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        there = positions[positions < len(self._samples)]
        return np.zeros_like(there), there


class _Packing:
    """Reads samples until a sequence is full. Samples, or parts of one, that are left begin the next sequence.

    The state is a state of the source, the samples to skip from there, and how many tokens of the next sample are
    used. A sequence may end within a sample, so the state of the source is the newest one before that sample.
    """

    def __init__(
        self, packer: PackedDataset, samples: _Waiting, rows: Iterator[Any], save: SaveState | None, state: str | None
    ) -> None:
        self._packer, self._samples, self._rows, self._save = packer, samples, rows, save
        self._lengths: list[int] = []
        self._marks: deque[tuple[int, str | None]] = deque()
        self._offset = 0
        if state is not None:
            with saved_in(state) as saved:
                samples.first, self._offset = operator.index(saved["skip"]), operator.index(saved["offset"])
                self._marks.append((0, json.dumps(saved["source"])))
            for _ in islice(rows, samples.first):
                pass

    def __iter__(self) -> _Packing:
        return self

    def __next__(self) -> Any:
        room = self._packer.units
        waiting, marked = sum(self._lengths) - self._offset, self._save is None
        while waiting < room:
            if not marked and self._save is not None:
                self._marks.append((len(self._samples), self._save()))
                marked = True
            sample = next(self._rows, _END)
            if sample is _END:
                break
            self._samples.rows.append(sample)
            place = np.array([len(self._samples) - 1])
            self._lengths.append(int(self._packer.amounts(np.zeros_like(place), place)[0]))
            waiting += self._lengths[-1]
        if not waiting:
            raise StopIteration
        packed = self._packer[start_of(self._samples.first, self._offset)]
        self._forget(room)
        return packed

    def _forget(self, room: int) -> None:
        """Let go of the samples that are packed."""
        used, done = self._offset, 0
        while done < len(self._lengths) and self._lengths[done] - used <= room:
            room -= self._lengths[done] - used
            used, done = 0, done + 1
        self._offset = used + room if self._packer.cuts and done < len(self._lengths) else 0
        del self._lengths[:done]
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
        return json.dumps({"source": json.loads(source), "skip": self._samples.first - row, "offset": self._offset})


class WrappedSource(Source):
    """A source that changes the rows of another source.

    Args:
        inner: the other source.
    """

    def __init__(self, inner: Source) -> None:
        self.inner = inner
        self.name, self.batches, self.short_batch = inner.name, inner.batches, inner.short_batch
        self.takes_shard = inner.takes_shard

    def rounds_to_replay(self, epoch: int) -> int:
        return self.inner.rounds_to_replay(epoch)

    def close(self) -> None:
        self.inner.close()


class _StagedSource(WrappedSource):
    """A source with a filter or a packer.

    Args:
        stage: the filter or packer.
        batches: whether it was said to yield batches.
    """

    def __init__(self, stage: _Stage, batches: bool | None) -> None:
        super().__init__(source_of(stage.source))
        if self.batches or batches:
            raise ConfigError(
                f"a {type(stage).__name__} reads and yields samples, not batches; give the loader a batch size, and "
                "the stream a source of samples"
            )
        self._stage = stage

    def open(self, epoch: int, shard: int, num_shards: int, state: str | None = None) -> Opened:
        rows, save = self.inner.open(epoch, shard, num_shards, state and self._stage.inner_state(state))
        return self._stage.rows(rows, save, state)


def source_of(thing: Any, batches: bool | None = None) -> Source:
    """The source that an iterable is, with its filters and packers.

    Args:
        thing: see `Source`, or a stream of this module.
        batches: see `Source`.

    Raises:
        ConfigError: It cannot be a source.
    """
    if isinstance(thing, (FilteredStream, PackedStream)):
        return _StagedSource(thing, batches)
    return Source(thing, batches)


def _stream(source: Any, instead: str) -> Any:
    if is_map_style(source):
        raise ConfigError(
            f"{type(source).__name__} has a length and gives samples by their index; use {instead}, which can be "
            "shuffled and resumes without reading"
        )
    return source
