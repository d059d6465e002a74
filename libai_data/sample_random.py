"""Randomness of a sample: drawn from (seed, epoch, index), so that it is the same whoever reads the sample, and when.

The loader says which samples are being read; transforms ask for `sample_generator`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from libai_data.mixing import combine64


class _Current(threading.local):
    """(seed, epoch, index) of each sample that a thread is reading."""

    keys: Sequence[tuple[int, int, int]] = ()
    failed: int | None = None
    reused: np.random.Generator | None = None


_current = _Current()
_NO_COUNT = np.zeros(4, np.uint64)
_STREAM_OF_BATCHES, _STREAM_OF_ROWS = -1, -2
_global_generators = threading.RLock()


class SampleKeys(Sequence[tuple[int, int, int]]):
    """(seed, epoch, index) of samples that are read together, made when somebody asks.

    Args:
        seed: the loader's.
        epochs: int64 [n].
        indices: int64 [n].
    """

    def __init__(self, seed: int, epochs: np.ndarray, indices: np.ndarray) -> None:
        self._seed, self._epochs, self._indices = seed, epochs, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: Any) -> Any:
        return self._seed, int(self._epochs[place]), int(self._indices[place])


class SampleKey(SampleKeys):
    """The key of one of some samples that are read one after the other; `row` says which is being read."""

    row = 0

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: Any) -> Any:
        return super().__getitem__((self.row,)[place])


class reading_samples:
    """Says which samples this thread reads within the block; the loader does so around each call of a dataset.

    Args:
        keys: (seed, epoch, index) of each sample.
    """

    # Not a generator, which costs four times as much: it is entered for each sample, or each batch.
    def __init__(self, keys: Sequence[tuple[int, int, int]]) -> None:
        self._keys = keys

    def __enter__(self) -> None:
        _current.keys, _current.failed = self._keys, None

    def __exit__(self, *failure: object) -> None:
        _current.keys = ()


class reading_row:
    """Says that, within the block, of the samples that are being read together one is read; `read_batch` may do so.

    `sample_generator` is then that sample's, and an error within the block is told with its index.

    Args:
        row: which of them.
    """

    def __init__(self, row: int) -> None:
        self._row = row

    def __enter__(self) -> None:
        self._outer = _current.keys
        if self._outer:
            _current.keys = (self._outer[self._row],)

    def __exit__(self, kind: object, *failure: object) -> None:
        if kind is not None and _current.keys:
            _current.failed = _current.keys[0][2]
        _current.keys = self._outer


def failed_sample() -> int | None:
    """Index of the sample over which this thread failed while it read several, if `reading_row` told."""
    return _current.failed


@contextmanager
def reading_some_of_them(rows: np.ndarray) -> Iterator[None]:
    """Says that, within the block, of the samples that are being read together only some are read.

    Args:
        rows: int64 [n], which of them.
    """
    keys = _current.keys
    with reading_inputs([keys[row] for row in rows.tolist()] if keys else ()):
        yield


@contextmanager
def reading_inputs(keys: Sequence[tuple[int, int, int]]) -> Iterator[None]:
    """Says that, within the block, other samples are read, of which the one that is being read is made.

    Args:
        keys: (seed, epoch, index) of each.
    """
    outer = _current.keys
    _current.keys = keys
    try:
        yield
    finally:
        _current.keys = outer


def sample_generator(stream: int = 0) -> np.random.Generator:
    """A random generator for the sample that is being read by `dataset[index]`.

    Args:
        stream: transforms of one sample that must not draw the same numbers take different streams.

    Returns:
        A generator that depends on (seed, epoch, index, stream) alone; outside a loader, an unseeded one.
    """
    return _generator(_current.keys[0], stream) if _current.keys else np.random.default_rng()


def passing_generator() -> np.random.Generator:
    """`sample_generator()`, in a third of its time: valid until this thread asks for another, so not to be kept."""
    if not _current.keys:
        return np.random.default_rng()
    if _current.reused is None:
        _current.reused = np.random.Generator(np.random.Philox())
    generator = _current.reused
    generator.bit_generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": _NO_COUNT, "key": _philox_key(_current.keys[0], 0)},
        "buffer": _NO_COUNT,
        "buffer_pos": len(_NO_COUNT),
        "has_uint32": 0,
        "uinteger": 0,
    }
    return generator


def sample_generators(stream: int = 0) -> list[np.random.Generator]:
    """`sample_generator` for each sample that is being read by `read_batch` or `__getitems__`, in their order."""
    return [_generator(key, stream) for key in _current.keys]


class BatchRandom:
    """Randomness of a batch, the same on every rank that holds a part of it.

    Args:
        seed: the loader's.
        position: of the global batch's first sample, in the stream.
        epochs: int64 [n], of the rows at hand.
        indices: int64 [n], of the rows at hand.
    """

    def __init__(self, seed: int, position: int, epochs: np.ndarray, indices: np.ndarray) -> None:
        self._seed, self._position = seed, position
        self._keys = SampleKeys(seed, epochs, indices)

    def of_batch(self) -> np.random.Generator:
        """A new generator that depends on (seed, position of the global batch) alone."""
        return _generator((self._seed, self._position, 0), _STREAM_OF_BATCHES)

    def of_row(self, row: int) -> np.random.Generator:
        """A new generator that depends on (seed, epoch, index) of the sample in this row alone.

        Args:
            row: of those at hand.
        """
        return _generator(self._keys[row], _STREAM_OF_ROWS)


def _generator(key: tuple[int, int, int], stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=_philox_key(key, stream)))


def _philox_key(key: tuple[int, int, int], stream: int) -> np.ndarray:
    high = combine64(*key, stream)
    # As an array: of a list with one number on either side of 2**63 numpy makes floats, which drop bits.
    return np.array([high, combine64(high)], dtype=np.uint64)


@contextmanager
def seeded_globals(seed: int | None = None) -> Iterator[None]:
    """Seed Python's and numpy's global generators for the sample that is being read, and put them back afterwards.

    For transforms of other libraries, which draw from these; threads take turns. Outside a loader nothing is seeded.

    Args:
        seed: what to seed with, instead of the sample's.
    """
    if seed is None and not _current.keys:
        yield
        return
    seed = combine64(*_current.keys[0]) if seed is None else seed
    with _global_generators:
        python_state, numpy_state = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
