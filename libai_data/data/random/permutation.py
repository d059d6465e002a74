"""Keyed permutations of 0, 1, ... size-1, in O(1) time and memory for any place.

Source: the generalised Feistel network of Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002),
with cycle walking; splitmix64's finaliser is the round function. A small permutation sorts hashes instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt
from typing import Any, Callable

import numpy as np

from libai_data.data.random.hashing import combine64, combine64_each, mix64_array

PERMUTATION_VERSION = 1
"""Raised whenever the same (size, seed, number) would give another permutation."""

_ROUNDS = 6
_SORTED_BELOW = 1024
_EACH_SORTED_BELOW = 256
_AT_ONCE = 1 << 15


def permuted(size: int, seed: int, number: int, places: np.ndarray) -> np.ndarray:
    """The values at these places, int64 [n], of one of the numbered permutations of 0, 1, ... size-1 of a seed (any
    int)."""
    if size < _SORTED_BELOW:
        return _small_permutation(size, seed, number)[places]
    return _walk(places.astype(np.uint64), size, _round_keys(seed, number), _feistel).astype(np.int64)


def whole_permutation(size: int, seed: int, number: int) -> np.ndarray:
    """All values of a permutation, int64 [size], computed in parts that fit into the processor's cache."""
    values = np.arange(size)
    for first in range(0, size, _AT_ONCE):
        values[first : first + _AT_ONCE] = permuted(size, seed, number, values[first : first + _AT_ONCE])
    return values


def places_in_permutation(size: int, seed: int, number: int, values: np.ndarray) -> np.ndarray:
    """The places of these values; the inverse of `permuted`."""
    if size < _SORTED_BELOW:
        return np.argsort(_small_permutation(size, seed, number), kind="stable")[values]
    return _walk(values.astype(np.uint64), size, _round_keys(seed, number), _feistel_back).astype(np.int64)


def permuted_each(sizes: np.ndarray, keys: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The values at places of many permutations: int64 [n], each below its size, uint64 [n]; `keys`, uint64 [n], decide
    the permutations."""
    return _in_each(sizes, keys, places, _feistel)


def places_in_each(sizes: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The places of these values; the inverse of `permuted_each`."""
    return _in_each(sizes, keys, values, _feistel_back)


def whole_permutations(sizes: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Permutation 0 of each seed in full, as `permuted` has it: int64 [n, greatest size]; the values behind the size of
    a row are undefined. Sizes are int64 [n], seeds uint64 [n]."""
    width, zero = int(sizes.max()), np.zeros(1, np.int64)
    if width >= _SORTED_BELOW:
        found = np.zeros((len(sizes), width), np.int64)
        for row, size, seed in zip(found, sizes.tolist(), seeds.tolist()):
            row[:size] = whole_permutation(size, seed, 0)
        return found
    keys = np.arange(width, dtype=np.uint64) + combine64_each((PERMUTATION_VERSION,), seeds, zero)[:, None]
    return _sorted_hashes(mix64_array(mix64_array(keys) ^ combine64_each((), seeds, zero)[:, None]), sizes)


def _sorted_hashes(hashes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The order of the first `sizes[row]` hashes of each row, and behind them the places of all other hashes."""
    hashes[np.arange(hashes.shape[1]) >= sizes[:, None]] = np.iinfo(np.uint64).max
    return np.argsort(hashes, axis=1, kind="stable")


def _round_keys(seed: int, number: int) -> tuple[int, ...]:
    return tuple(combine64(PERMUTATION_VERSION, seed, number, turn) for turn in range(_ROUNDS))


@lru_cache(maxsize=4)
def _small_permutation(size: int, seed: int, number: int) -> np.ndarray:
    keys = np.arange(size, dtype=np.uint64) + np.uint64(combine64(PERMUTATION_VERSION, seed, number))
    return np.argsort(mix64_array(mix64_array(keys) ^ np.uint64(combine64(seed, number))), kind="stable")


_Cipher = Callable[[np.ndarray, Any, Any, Sequence[Any]], np.ndarray]


def _walk(values: np.ndarray, size: int, keys: tuple[int, ...], cipher: _Cipher) -> np.ndarray:
    """Encipher within the smallest grid of at least `size` values, again and again until the value is below `size`.

    The inverse cipher walks the same cycles backwards, and so gives the inverse permutation.
    """
    columns = isqrt(size - 1) + 1
    rows = -(-size // columns)
    values = cipher(values, columns, rows, keys)
    outside = np.flatnonzero(values >= np.uint64(size))
    while len(outside):
        values[outside] = cipher(values[outside], columns, rows, keys)
        outside = outside[values[outside] >= np.uint64(size)]
    return values


def _in_each(sizes: np.ndarray, keys: np.ndarray, values: np.ndarray, cipher: _Cipher) -> np.ndarray:
    small = sizes < _EACH_SORTED_BELOW
    if not small.any():
        return _walk_each(sizes, keys, values, cipher)
    found = np.empty(len(values), dtype=np.int64)
    found[~small] = _walk_each(sizes[~small], keys[~small], values[~small], cipher)
    found[small] = _sort_each(sizes[small], keys[small], values[small], cipher is _feistel_back)
    return found


def _sort_each(sizes: np.ndarray, keys: np.ndarray, values: np.ndarray, inverse: bool) -> np.ndarray:
    """Small permutations: each sorts its places by hashes of its key and the place."""
    unique, firsts, numbers = np.unique(keys, return_index=True, return_inverse=True)
    places = np.arange(int(sizes.max()), dtype=np.uint64)
    hashes = mix64_array(mix64_array(places + unique[:, None]) ^ mix64_array(~unique)[:, None])
    permutations = _sorted_hashes(hashes, sizes[firsts])
    if inverse:
        permutations = np.argsort(permutations, axis=1, kind="stable")
    return np.asarray(permutations[numbers, values])


def _walk_each(sizes: np.ndarray, keys: np.ndarray, values: np.ndarray, cipher: _Cipher) -> np.ndarray:
    """`_walk`, with a size and a key for each value."""
    columns = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    rows = (sizes + columns - np.uint64(1)) // columns
    turns = [mix64_array(keys + np.uint64(combine64(PERMUTATION_VERSION, turn))) for turn in range(_ROUNDS)]
    found = cipher(values.astype(np.uint64), columns, rows, turns)
    outside = np.flatnonzero(found >= sizes)
    while len(outside):
        own_turns = [turn[outside] for turn in turns]
        found[outside] = cipher(found[outside], columns[outside], rows[outside], own_turns)
        outside = outside[found[outside] >= sizes[outside]]
    return found.astype(np.int64)


def _feistel(values: np.ndarray, columns: Any, rows: Any, keys: Sequence[Any]) -> np.ndarray:
    right, left = np.divmod(values, np.uint64(columns))
    for number, key in enumerate(keys):
        modulus = np.uint64(columns if number % 2 == 0 else rows)
        left, right = right, (left + mix64_array(right ^ np.uint64(key)) % modulus) % modulus
    return right * np.uint64(columns) + left


def _feistel_back(values: np.ndarray, columns: Any, rows: Any, keys: Sequence[Any]) -> np.ndarray:
    right, left = np.divmod(values, np.uint64(columns))
    for number, key in reversed(list(enumerate(keys))):
        modulus = np.uint64(columns if number % 2 == 0 else rows)
        left, right = (right + modulus - mix64_array(left ^ np.uint64(key)) % modulus) % modulus, left
    return right * np.uint64(columns) + left
