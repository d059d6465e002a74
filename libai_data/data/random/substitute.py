"""Which samples are tried instead of a sample that cannot be read."""

from __future__ import annotations

from libai_data.data.random.hashing import combine64

SUBSTITUTES = 100
"""The number of other samples that are tried instead of a sample that fails."""


def substitute_index(seed: int, epoch: int, index: int, attempt: int, size: int) -> int:
    """The index of the sample to try instead of one that fails; the same in each process that reads it."""
    return combine64(seed, epoch, index, attempt) % size
