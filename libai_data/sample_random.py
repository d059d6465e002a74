"""Randomness of a sample: drawn from (seed, epoch, index), so that it is the same whoever reads the sample, and when.

The loader says which sample is being read; transforms ask for `sample_generator`.
"""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from typing import Iterator, Optional, Tuple

import numpy as np

from libai_data.mixing import combine64


class _Current(threading.local):
    key: Optional[Tuple[int, int, int]] = None


_current = _Current()


def set_current_sample(seed: int, epoch: int, index: int) -> None:
    """Say which sample this thread reads from now on; the loader calls it before each `dataset[index]`."""
    _current.key = (seed, epoch, index)


def clear_current_sample() -> None:
    """Say that this thread reads no sample of a loader any more."""
    _current.key = None


def sample_generator(stream: int = 0) -> np.random.Generator:
    """A random generator for the sample that is being read.

    Args:
        stream: transforms of one sample that must not draw the same numbers take different streams.

    Returns:
        A generator that depends on (seed, epoch, index, stream) alone; outside a loader, an unseeded one.
    """
    if _current.key is None:
        return np.random.default_rng()
    high = combine64(*_current.key, stream)
    return np.random.Generator(np.random.Philox(key=[high, combine64(high)]))


@contextmanager
def seeded_globals() -> Iterator[None]:
    """Seed Python's and numpy's global generators for the sample that is being read, and put them back afterwards.

    For transforms of other libraries, which draw from these. Outside a loader nothing is seeded.
    """
    if _current.key is None:
        yield
        return
    seed = combine64(*_current.key)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
