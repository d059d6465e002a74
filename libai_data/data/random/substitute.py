"""Which samples are tried in the place of one that cannot be read."""

from __future__ import annotations

from libai_data.data.random.hashing import combine64

SUBSTITUTES = 100
"""How many other samples are tried in the place of one that fails."""


def substitute_index(seed: int, epoch: int, index: int, attempt: int, size: int) -> int:
    """The sample to try in the place of one that fails: the same for whoever reads it."""
    return combine64(seed, epoch, index, attempt) % size
