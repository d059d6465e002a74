"""Randomness of a sample. It depends on (seed, epoch, index) alone, not on the process that reads the sample, or when.

The loader sets which samples are being read. Transforms call `sample_generator`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from libai_data.data.fork_lock import end_fork
from libai_data.data.random.hashing import combine64


class _ThisThread(threading.local):
    """What the current thread reads, and what its readings have done."""

    reading: reading_samples | None = None
    spare: np.random.Generator | None = None
    ambiguities = 0
    """How many times this thread asked for one generator while it read several samples."""
    shares = False
    """Whether other threads read at the same time."""
    has_drawn = False
    """Whether a generator has moved while this thread shared the generators."""
    has_seeded = False
    """Whether code that this thread called has seeded the generators, and restored them."""
    callers: frozenset[int] = frozenset()
    """Identifiers of the threads that only wait for what this thread reads."""


this_thread = _ThisThread()
_reading_threads: set[int] = set()
_is_worker = False
_NO_COUNT = np.zeros(4, np.uint64)
_STREAM_OF_BATCHES, _STREAM_OF_ROWS, _FIRST_STREAM_OF_MAPS = -1, -2, 1 << 16


def become_worker_process() -> None:
    """Mark this process as one that exists to read samples; a worker calls this once."""
    global _is_worker
    _is_worker = True


def is_worker_process() -> bool:
    """Whether this process exists to read samples."""
    return _is_worker


class SampleKeys(Sequence[tuple[int, int, int]]):
    """(seed, epoch, index) of samples that are read together, from int64 [n]; made when they are needed."""

    def __init__(self, seed: int, epochs: np.ndarray, indices: np.ndarray) -> None:
        self._seed, self._epochs, self._indices = seed, epochs, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: Any) -> Any:
        return self._seed, int(self._epochs[place]), int(self._indices[place])


class SampleKey(SampleKeys):
    """The key of the sample that is being read, of samples that are read one by one; `row` is the sample's number."""

    row = 0

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: Any) -> Any:
        return super().__getitem__((self.row,)[place])


class reading_samples:
    """Sets which samples this thread reads within the block; the loader does so around each call of a dataset.

    Blocks may be nested, for example if a dataset has a loader of its own. If a user's code forks the process within
    a block and lets the child return, the child ends: otherwise it would do the reader's tasks, too.

    Args:
        keys: (seed, epoch, index) of each sample.
    """

    is_in_fork = False
    """Whether this process was forked within the block."""
    failed: int | None = None
    """Index of the sample that made the block fail, if `reading_row` set it."""
    replaced: Sequence[tuple[int, int, int, str, str]] = ()
    """(epoch, index, substitute, reason, kind of error) of each failed input of the sample that is being read."""
    _outer: reading_samples | None = None
    _row = -1
    _maps = 0

    # Not a generator, which would cost four times as much: the block is entered for each sample, or each batch.
    def __init__(self, keys: Sequence[tuple[int, int, int]]) -> None:
        self.keys = keys

    def __enter__(self) -> reading_samples:
        self._outer = this_thread.reading
        this_thread.reading = self
        if self._outer is None:
            _reading_threads.add(threading.get_ident())
        return self

    def __exit__(self, *failure: object) -> None:
        if self.is_in_fork:
            end_fork()
        this_thread.reading = self._outer
        if self._outer is None:
            _reading_threads.discard(threading.get_ident())

    def maps(self) -> int:
        """The number of `RandomMap`s that were applied to the sample that is being read."""
        row = getattr(self.keys, "row", -1)
        if row != self._row:
            self._row, self._maps = row, 0
        return self._maps

    def set_maps(self, maps: int) -> None:
        """Set the number of `RandomMap`s that were applied to the sample."""
        self._maps = maps


class reading_inputs(reading_samples):
    """Within the block, this thread reads the inputs of the sample that is being read."""

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        if self._outer is not None:
            # `RandomMap`s above draw other numbers than those below, even if both samples have the same key.
            self._outer.set_maps(max(self._outer.maps(), self.maps()))


class reading_row(reading_samples):
    """Within the block, this thread reads one of the samples that are read together; for use in `read_batch`.

    `sample_generator` then returns the generator of this sample, and an error within the block names its index.
    """

    def __init__(self, row: int) -> None:
        super().__init__([_keys()[row]] if _keys() else ())

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        if failure[0] is not None and self.keys and self._outer is not None:
            self._outer.failed = self.keys[0][2]


def reading_some_of_them(rows: np.ndarray) -> reading_samples:
    """Within the block, this thread reads only these rows, int64 [n], of the samples that are read together."""
    keys = _keys()
    return reading_inputs([keys[row] for row in rows.tolist()] if keys else ())


def reading_now() -> reading_samples | None:
    """The innermost block that this thread is in."""
    return this_thread.reading


def end_blocks_since(outer: reading_samples | None) -> None:
    """End the blocks that this thread has entered since `outer`, because a Ctrl-C can prevent a block's own exit."""
    this_thread.reading = outer
    if outer is None:
        _reading_threads.discard(threading.get_ident())


def _keys() -> Sequence[tuple[int, int, int]]:
    return () if this_thread.reading is None else this_thread.reading.keys


def sample_generator(stream: int = 0) -> np.random.Generator:
    """A random generator for the sample that is being read by `dataset[index]`.

    Args:
        stream: use different streams for transforms of one sample that must not draw the same numbers.

    Returns:
        A generator that depends on (seed, epoch, index, stream) alone; outside a loader, an unseeded one.

    Raises:
        RuntimeError: The calling thread reads no sample itself, for example because a dataset has started it.
    """
    return _generator(_key(), stream) if _reads() else np.random.default_rng()


def map_generator() -> np.random.Generator:
    """`sample_generator` with another stream at each call for a sample, for maps that may be nested."""
    reading = this_thread.reading
    if not _reads() or reading is None:
        return np.random.default_rng()
    maps = reading.maps()
    reading.set_maps(maps + 1)
    return _generator(_key(), _FIRST_STREAM_OF_MAPS + maps)


class map_attempt:
    """If the block fails, resets the streams of `map_generator` to those before it, so that a retry draws the same."""

    def __enter__(self) -> None:
        self._reading = this_thread.reading
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
        this_thread.ambiguities += 1
    return keys[0]


class passing_generator:
    """Within the block, `sample_generator()` in a third of its time. The generator must not be kept after the block."""

    _used: np.random.Generator | None = None

    def __enter__(self) -> np.random.Generator:
        if not _reads():
            return np.random.default_rng()
        # A nested block, for another input of the same sample, finds no spare generator, and makes its own.
        generator, this_thread.spare = this_thread.spare, None
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
            this_thread.spare = self._used


def sample_generators(stream: int = 0) -> list[np.random.Generator]:
    """`sample_generator` for each sample that is being read by `read_batch` or `__getitems__`, in their order."""
    return [_generator(key, stream) for key in _keys()]


class BatchRandom:
    """Randomness of a batch, the same on every rank that has a part of the batch.

    Args:
        seed: the loader's.
        position: of the global batch's first sample, in the stream.
        epochs: int64 [n], of the rows of this part.
        indices: int64 [n], of the rows of this part.
    """

    def __init__(self, seed: int, position: int, epochs: np.ndarray, indices: np.ndarray) -> None:
        self._seed, self._position = seed, position
        self._keys = SampleKeys(seed, epochs, indices)

    def of_batch(self) -> np.random.Generator:
        """A new generator that depends on (seed, position of the global batch) alone."""
        return _generator((self._seed, self._position, 0), _STREAM_OF_BATCHES)

    def of_row(self, row: int) -> np.random.Generator:
        """A new generator that depends on (seed, epoch, index) of the sample in this row of this part alone."""
        return _generator(self._keys[row], _STREAM_OF_ROWS)


def _generator(key: tuple[int, int, int], stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=_philox_key(key, stream)))


def _philox_key(key: tuple[int, int, int], stream: int) -> np.ndarray:
    high = combine64(*key, stream)
    # With a dtype, because numpy makes floats, which drop bits, of a list with numbers on both sides of 2**63.
    return np.array([high, combine64(high)], dtype=np.uint64)


def _after_fork() -> None:
    reading = this_thread.reading
    while reading is not None:
        reading.is_in_fork, reading = True, reading._outer


os.register_at_fork(after_in_child=_after_fork)
