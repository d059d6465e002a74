"""The states of the random generators that all code shares: Python's, numpy's, torch's, OneFlow's.

A generator's *mark* is a few bytes, or words, that change with each draw. Its *state* decides all later draws.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from contextlib import AbstractContextManager
from functools import cache
from operator import methodcaller
from typing import Any

import numpy as np

from libai_data.data.fork_lock import ForkLock
from libai_data.data.random.hashing import mix64
from libai_data.data.random.sample_random import is_worker_process

_WORDS = 624
_flow_was_forked = False
_generator_lock = ForkLock()
"""For the generators of PyTorch and OneFlow. Both acquire a lock of their own while they hold the GIL, and make objects
under it. If this starts the garbage collection, a finalizer may let another thread run, which would hold the GIL and
wait for that lock forever. With this lock of Python, the other thread waits earlier, without the GIL."""
_mark = methodcaller("mark")
_last: list[tuple[list[Any], list[Any]]] = [([], [])]
"""Marks of the generators, and their states, which are valid as long as the marks do not change."""


class _Python:
    name = "random"

    def __init__(self) -> None:
        self._instance: Any = random._inst
        address = id(self._instance) + object.__basicsize__
        words = (ctypes.c_uint32 * (1 + _WORDS)).from_address(address)
        # CPython stores the place and then the words. The place and the first word change with each draw, the last word
        # with each seed.
        *state, place = random.getstate()[1]
        if list(words) != [place, *state]:
            self.mark = random.getstate  # type: ignore[method-assign]
        self._place = ctypes.c_uint64.from_address(address)
        self._last = ctypes.c_uint32.from_address(address + 4 * _WORDS)

    def mark(self) -> Any:
        return self._place.value, self._last.value, self._instance.gauss_next

    def save(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)

    def seed(self, seed: int) -> None:
        random.seed(seed)


class _Numpy:
    name = "numpy.random"

    def __init__(self) -> None:
        self._rand: Any = np.random.mtrand._rand
        self._keeps = _flag_of_kept_number(self._rand)
        self._bits: Any = None
        self._place: Any = None
        self._address = 0

    def mark(self) -> Any:
        bits = self._rand._bit_generator
        if bits is not self._bits:
            self._bits, self._place = bits, None
            if isinstance(bits, np.random.MT19937) and self._keeps is not None:
                # Numpy's interface for ctypes: uint32 key[624], int pos. The last word and the place change.
                self._address = bits.ctypes.state_address
                self._place = ctypes.c_uint64.from_address(self._address + 4 * (_WORDS - 1))
        if self._place is None:
            return str(np.random.get_state(legacy=False))
        return self._place.value, self._keeps.value

    def save(self) -> Any:
        words = None if self._place is None else ctypes.string_at(self._address, 4 * _WORDS + 4)
        return np.random.get_state(legacy=False), words

    def restore(self, saved: Any) -> None:
        state, words = saved
        if state["has_gauss"] or words is None or self._place is None:
            np.random.set_state(state)
            return
        # Ten times as fast as `set_state`: drop the number that numpy keeps, and restore the words.
        np.random.seed(0)
        ctypes.memmove(self._address, words, len(words))

    def seed(self, seed: int) -> None:
        np.random.seed(seed & 0xFFFFFFFF)


def _flag_of_kept_number(rand: Any) -> Any:
    """The flag in the memory of a `RandomState` that tells whether it keeps a normal number for the next draw.

    Drawing this number changes nothing else. Numpy's legacy-distributions.h: `int has_gauss; double gauss`. None if the
    memory is another one.
    """
    known = np.random.RandomState(0)
    known.normal()
    kept = np.float64(known.get_state(legacy=False)["gauss"]).tobytes()
    place = ctypes.string_at(id(known), type(known).__basicsize__).find(kept) - 8
    if place < object.__basicsize__ or type(rand) is not type(known):
        return None
    flag = ctypes.c_int.from_address(id(known) + place)
    before, _, after = flag.value, known.normal(), flag.value
    return ctypes.c_int.from_address(id(rand) + place) if (before, after) == (1, 0) else None


class _OfLibrary:
    """The generator of PyTorch or OneFlow, each of which is seeded with other numbers than numpy's."""

    def __init__(self, name: str, seed_offset: int) -> None:
        self.name, self._seed_offset = name, seed_offset
        self._generator: Any = sys.modules[name].default_generator

    def mark(self) -> Any:
        return self.save().numpy().tobytes()

    def save(self) -> Any:
        with _generator_lock:
            return self._generator.get_state()

    def restore(self, state: Any) -> None:
        with _generator_lock:
            self._generator.set_state(state)

    def seed(self, seed: int) -> None:
        with _generator_lock:
            self._generator.manual_seed(mix64(seed + self._seed_offset) >> 1)


class _Flow(_OfLibrary):
    """OneFlow's. After `restore`, it continues some hundred numbers later, because OneFlow shows no exact place."""

    def save(self) -> Any:
        return None if is_worker_process() else super().save()

    def restore(self, state: Any) -> None:
        if state is not None:
            super().restore(state)


@cache
def _watched(has_torch: bool) -> tuple[Any, ...]:
    return (*_watched(False), _OfLibrary("torch", 1)) if has_torch else (_Python(), _Numpy())


@cache
def flow_generator() -> _Flow:
    """OneFlow's generator."""
    return _Flow("oneflow", 2)


def watched() -> tuple[Any, ...]:
    """The generators whose marks show whether they have moved."""
    return _watched(hasattr(sys.modules.get("torch"), "default_generator"))


def generators_in_turn() -> AbstractContextManager[Any]:
    """The lock for code that reads or seeds the generators of PyTorch or OneFlow, in one thread at a time."""
    return _generator_lock


def marks_of(generators: tuple[Any, ...]) -> list[Any]:
    """The mark of each generator."""
    return [*map(_mark, generators)]


def marks_and_states(generators: tuple[Any, ...], beside_others: bool) -> tuple[list[Any], list[Any]]:
    """Marks and states of generators.

    Args:
        generators: see `watched`.
        beside_others: whether other threads may draw meanwhile. The marks belong to the states in any case.
    """
    last, marks = _last[0], marks_of(generators)
    if last[0] == marks:
        return last
    while True:
        before, states = marks, [generator.save() for generator in generators]
        marks = marks_of(generators)
        if marks == before or not beside_others:
            _last[0] = last = marks, states
            return last


def has_flow() -> bool:
    """Whether OneFlow can be used here: it is imported, and no fork has ended its threads."""
    return not _flow_was_forked and hasattr(sys.modules.get("oneflow"), "default_generator")


def present() -> tuple[Any, ...]:
    """The generators whose libraries are imported."""
    return (*watched(), flow_generator()) if has_flow() else watched()


def _after_fork() -> None:
    global _flow_was_forked
    _flow_was_forked = "oneflow" in sys.modules


os.register_at_fork(after_in_child=_after_fork)
