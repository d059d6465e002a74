"""Keyed permutations of 0, 1, ... size-1, in O(1) time and memory for any of their places.

The generalised Feistel network of Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), with cycle
walking, and splitmix64's finaliser as the round function; small ones are a sort of hashes.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt
from typing import Callable

import numpy as np

from libai_data.data.random.hashing import combine64, mix64_array

PERMUTATION_VERSION = 1
"""Raised whenever the same (size, seed, number) would give another permutation."""

_ROUNDS = 6
_SORTED_BELOW = 1024


def permuted(size: int, seed: int, number: int, places: np.ndarray) -> np.ndarray:
    """What stands at these places of a permutation.

    Args:
        size: of the permutation.
        seed: any int.
        number: of the permutation among those of the seed.
        places: int64 [n], each of 0..size-1.

    Returns:
        int64 [n], each of 0..size-1.
    """
    if size < _SORTED_BELOW:
        return _small_permutation(size, seed, number)[places]
    return _walk(places.astype(np.uint64), size, _round_keys(seed, number), _feistel).astype(np.int64)


def places_in_permutation(size: int, seed: int, number: int, values: np.ndarray) -> np.ndarray:
    """Where these values stand; the inverse of `permuted`."""
    if size < _SORTED_BELOW:
        return np.argsort(_small_permutation(size, seed, number), kind="stable")[values]
    return _walk(values.astype(np.uint64), size, _round_keys(seed, number), _feistel_back).astype(np.int64)


def _round_keys(seed: int, number: int) -> tuple[int, ...]:
    return tuple(combine64(PERMUTATION_VERSION, seed, number, turn) for turn in range(_ROUNDS))


@lru_cache(maxsize=4)
def _small_permutation(size: int, seed: int, number: int) -> np.ndarray:
    keys = np.arange(size, dtype=np.uint64) + np.uint64(combine64(PERMUTATION_VERSION, seed, number))
    return np.argsort(mix64_array(mix64_array(keys) ^ np.uint64(combine64(seed, number))), kind="stable")


_Cipher = Callable[[np.ndarray, int, int, tuple[int, ...]], np.ndarray]


def _walk(values: np.ndarray, size: int, keys: tuple[int, ...], cipher: _Cipher) -> np.ndarray:
    """Encipher within the smallest grid that holds `size`, again and again until the value lies below `size`.

    With the inverse cipher it walks the same cycles backwards, and so is the inverse.
    """
    columns = isqrt(size - 1) + 1
    rows = -(-size // columns)
    values = cipher(values, columns, rows, keys)
    outside = np.flatnonzero(values >= np.uint64(size))
    while len(outside):
        values[outside] = cipher(values[outside], columns, rows, keys)
        outside = outside[values[outside] >= np.uint64(size)]
    return values


def _feistel(values: np.ndarray, columns: int, rows: int, keys: tuple[int, ...]) -> np.ndarray:
    right, left = np.divmod(values, np.uint64(columns))
    for number, key in enumerate(keys):
        modulus = np.uint64(columns if number % 2 == 0 else rows)
        left, right = right, (left + mix64_array(right ^ np.uint64(key)) % modulus) % modulus
    return right * np.uint64(columns) + left


def _feistel_back(values: np.ndarray, columns: int, rows: int, keys: tuple[int, ...]) -> np.ndarray:
    right, left = np.divmod(values, np.uint64(columns))
    for number, key in reversed(list(enumerate(keys))):
        modulus = np.uint64(columns if number % 2 == 0 else rows)
        left, right = (right + modulus - mix64_array(left ^ np.uint64(key)) % modulus) % modulus, left
    return right * np.uint64(columns) + left
