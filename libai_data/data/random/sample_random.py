"""Randomness of a sample: drawn from (seed, epoch, index), so that it is the same whoever reads the sample, and when.

The loader says which samples are being read; transforms ask for `sample_generator`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from libai_data.data.random.hashing import combine64


class _Current(threading.local):
    """What a thread reads."""

    reading: reading_samples | None = None
    ambiguous = False
    spare: np.random.Generator | None = None


_current = _Current()
_reading_threads: set[int] = set()
_is_worker = False
_NO_COUNT = np.zeros(4, np.uint64)
_STREAM_OF_BATCHES, _STREAM_OF_ROWS, _FIRST_STREAM_OF_MAPS = -1, -2, 1 << 16


def become_worker_process() -> None:
    """Say that this process exists to read samples; a worker says so once."""
    global _is_worker
    _is_worker = True


def is_worker_process() -> bool:
    """Whether this process exists to read samples."""
    return _is_worker


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

    Blocks may lie within each other, as when a dataset reads by a loader of its own.

    Args:
        keys: (seed, epoch, index) of each sample.
    """

    failed: int | None = None
    """Index of the sample over which the block failed, if `reading_row` told."""
    replaced: Sequence[tuple[int, int, int, str, str]] = ()
    """(epoch, index, substitute, reason, kind of error) of failing samples of which the one that is read is made."""
    _outer: reading_samples | None = None
    _row = -1
    _maps = 0

    # Not a generator, which costs four times as much: it is entered for each sample, or each batch.
    def __init__(self, keys: Sequence[tuple[int, int, int]]) -> None:
        self.keys = keys

    def __enter__(self) -> reading_samples:
        self._outer = _current.reading
        _current.reading = self
        if self._outer is None:
            _reading_threads.add(threading.get_ident())
        return self

    def __exit__(self, *failure: object) -> None:
        _current.reading = self._outer
        if self._outer is None:
            _reading_threads.discard(threading.get_ident())

    def maps(self) -> int:
        """`RandomMap`s that the sample which is being read has passed."""
        row = getattr(self.keys, "row", -1)
        if row != self._row:
            self._row, self._maps = row, 0
        return self._maps

    def set_maps(self, maps: int) -> None:
        """Say how many `RandomMap`s it has passed now."""
        self._maps = maps


class reading_inputs(reading_samples):
    """Says that, within the block, other samples are read, of which the one that is being read is made."""

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        if self._outer is not None:
            # `RandomMap`s above draw other numbers than those below, even if both samples have the same key.
            self._outer.set_maps(max(self._outer.maps(), self.maps()))


class reading_row(reading_samples):
    """Says that, within the block, of the samples that are being read together one is read; `read_batch` may do so.

    `sample_generator` is then that sample's, and an error within the block is told with its index.
    """

    def __init__(self, row: int) -> None:
        super().__init__([_keys()[row]] if _keys() else ())

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        if failure[0] is not None and self.keys and self._outer is not None:
            self._outer.failed = self.keys[0][2]


def reading_some_of_them(rows: np.ndarray) -> reading_samples:
    """Says that, within the block, of the samples that are being read together only some are read.

    Args:
        rows: int64 [n], which of them.
    """
    keys = _keys()
    return reading_inputs([keys[row] for row in rows.tolist()] if keys else ())


def reading_now() -> reading_samples | None:
    """The innermost block that this thread is in."""
    return _current.reading


def end_blocks_since(outer: reading_samples | None) -> None:
    """End the blocks that this thread has entered since then: a Ctrl-C can come where one is left, before its end."""
    _current.reading = outer
    if outer is None:
        _reading_threads.discard(threading.get_ident())


def _keys() -> Sequence[tuple[int, int, int]]:
    return () if _current.reading is None else _current.reading.keys


def sample_generator(stream: int = 0) -> np.random.Generator:
    """A random generator for the sample that is being read by `dataset[index]`.

    Args:
        stream: transforms of one sample that must not draw the same numbers take different streams.

    Returns:
        A generator that depends on (seed, epoch, index, stream) alone; outside a loader, an unseeded one.

    Raises:
        RuntimeError: A thread that a dataset has started asks; it reads no sample itself.
    """
    return _generator(_key(), stream) if _reads() else np.random.default_rng()


def map_generator() -> np.random.Generator:
    """`sample_generator` with another stream at each call for a sample, for what may lie in several layers."""
    reading = _current.reading
    if not _reads() or reading is None:
        return np.random.default_rng()
    maps = reading.maps()
    reading.set_maps(maps + 1)
    return _generator(_key(), _FIRST_STREAM_OF_MAPS + maps)


class map_attempt:
    """Takes back, if the block fails, the streams that `map_generator` gave within it: a retry draws the same."""

    def __enter__(self) -> None:
        self._reading = _current.reading
        self._before = 0 if self._reading is None else self._reading.maps()

    def __exit__(self, kind: object, *failure: object) -> None:
        if kind is not None and self._reading is not None:
            self._reading.set_maps(self._before)


def _reads() -> bool:
    """Whether this thread reads a sample."""
    if _keys():
        return True
    if threading.current_thread() is not threading.main_thread() and (_is_worker or _reading_threads):
        raise RuntimeError(
            f"thread {threading.current_thread().name!r} asked for a sample's generator, but reads no sample: "
            "generators belong to the thread in which a loader calls dataset[index]. Ask there, with another "
            "sample_generator(stream=...) for each task, and hand them to the thread; or, outside a loader, read "
            "within `with reading_samples(((seed, epoch, index),))`"
        )
    return False


def _key() -> tuple[int, int, int]:
    keys = _keys()
    if len(keys) > 1:
        _current.ambiguous = True
    return keys[0]


def set_ambiguity(ambiguous: bool) -> bool:
    """Whether this thread has asked for one generator while it read several samples; what is known from now on."""
    before, _current.ambiguous = _current.ambiguous, ambiguous
    return before


class passing_generator:
    """Within the block, `sample_generator()`, in a third of its time; not to be kept."""

    _used: np.random.Generator | None = None

    def __enter__(self) -> np.random.Generator:
        if not _reads():
            return np.random.default_rng()
        # A block within this one, of another thing that the same sample is made of, finds no spare one.
        generator, _current.spare = _current.spare, None
        self._used = generator = generator or np.random.Generator(np.random.Philox())
        generator.bit_generator.state = {
            "bit_generator": "Philox",
            "state": {"counter": _NO_COUNT, "key": _philox_key(_key(), 0)},
            "buffer": _NO_COUNT,
            "buffer_pos": len(_NO_COUNT),
            "has_uint32": 0,
            "uinteger": 0,
        }
        return generator

    def __exit__(self, *failure: object) -> None:
        if self._used is not None:
            _current.spare = self._used


def sample_generators(stream: int = 0) -> list[np.random.Generator]:
    """`sample_generator` for each sample that is being read by `read_batch` or `__getitems__`, in their order."""
    return [_generator(key, stream) for key in _keys()]


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
