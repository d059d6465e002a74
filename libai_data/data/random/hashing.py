"""Mixing integers into 64 bits, for orders, seeds and fingerprints.

The mixer is splitmix64's finaliser with Stafford's constants (variant 13): a bijection in which each input bit affects
each output bit. Source: G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(value: int) -> int:
    """Mix the low 64 bits of an integer."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def mix64_array(values: np.ndarray) -> np.ndarray:
    """Mix each element of a uint64 array."""
    shifted = values >> np.uint64(30)
    mixed = values ^ shifted
    mixed *= np.uint64(_FIRST)
    mixed ^= np.right_shift(mixed, np.uint64(27), out=shifted)
    mixed *= np.uint64(_SECOND)
    mixed ^= np.right_shift(mixed, np.uint64(31), out=shifted)
    return mixed


def combine64(*parts: int) -> int:
    """Mix several integers, of up to 128 bits and any sign, into one of 64 bits; the order of the parts matters."""
    return _combined(len(parts), parts)


def combine64_each(first: Sequence[int], *parts: np.ndarray) -> np.ndarray:
    """`combine64` of `first` and of each element of `parts` (int64 [n], none negative), as uint64 [n]."""
    mixed = np.full(len(parts[0]), _combined(len(first) + len(parts), first), dtype=np.uint64)
    for part in parts:
        mixed = mix64_array(mixed + np.uint64(_GOLDEN) + mix64_array(part.astype(np.uint64)))
    return mixed


def _combined(mixed: int, parts: Sequence[int]) -> int:
    for part in map(int, parts):
        high = part >> 64
        mixed = mix64(mixed + _GOLDEN + mix64(part ^ mix64(high) if high else part))
    return mixed
