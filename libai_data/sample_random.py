"""Randomness of a sample: drawn from (seed, epoch, index), so that it is the same whoever reads the sample, and when.

The loader says which samples are being read; transforms ask for `sample_generator`.
"""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from typing import Iterator, List, Sequence, Tuple

import numpy as np

from libai_data.mixing import combine64


class CurrentSamples(threading.local):
    """(seed, epoch, index) of each sample that a thread is reading."""

    keys: Sequence[Tuple[int, int, int]] = ()


_current = CurrentSamples()
_global_generators = threading.RLock()


@contextmanager
def reading_samples(keys: Sequence[Tuple[int, int, int]] = ()) -> Iterator[CurrentSamples]:
    """Say which samples this thread reads within the block; the loader does so around each call of a dataset.

    Args:
        keys: (seed, epoch, index) of each sample.

    Yields:
        Where who reads sample after sample sets the keys of the next one.
    """
    _current.keys = keys
    try:
        yield _current
    finally:
        _current.keys = ()


def sample_generator(stream: int = 0) -> np.random.Generator:
    """A random generator for the sample that is being read by `dataset[index]`.

    Args:
        stream: transforms of one sample that must not draw the same numbers take different streams.

    Returns:
        A generator that depends on (seed, epoch, index, stream) alone; outside a loader, an unseeded one.
    """
    return _generator(_current.keys[0], stream) if _current.keys else np.random.default_rng()


def sample_generators(stream: int = 0) -> List[np.random.Generator]:
    """`sample_generator` for each sample that is being read by `read_batch` or `__getitems__`, in their order."""
    return [_generator(key, stream) for key in _current.keys]


def _generator(key: Tuple[int, int, int], stream: int) -> np.random.Generator:
    high = combine64(*key, stream)
    # As an array: of a list with one number on either side of 2**63 numpy makes floats, which drop bits.
    return np.random.Generator(np.random.Philox(key=np.array([high, combine64(high)], dtype=np.uint64)))


@contextmanager
def seeded_globals() -> Iterator[None]:
    """Seed Python's and numpy's global generators for the sample that is being read, and put them back afterwards.

    For transforms of other libraries, which draw from these; threads take turns. Outside a loader nothing is seeded.
    """
    if not _current.keys:
        yield
        return
    seed = combine64(*_current.keys[0])
    with _global_generators:
        python_state, numpy_state = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
