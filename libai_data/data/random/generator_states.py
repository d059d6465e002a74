"""States of the random generators that all code shares: Python's, numpy's, torch's, OneFlow's.

A generator's *mark* is a few bytes, or words, that change with each draw. Its *state* decides all later draws.
"""

from __future__ import annotations

import ctypes
import operator
import os
import random
import sys
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Callable

import numpy as np

from libai_data.data.fork_lock import ForkLock
from libai_data.data.random.hashing import mix64
from libai_data.data.random.sample_random import is_worker_process

_WORDS = 624
_BYTES = 4 * _WORDS
_TORCHS_FLAGS = 5040, 5052
"""Where a state of PyTorch says whether it keeps a float64, or a float32, for the next draw."""
_flow_was_forked = False
_generator_lock = ForkLock()
"""For the generators of PyTorch and OneFlow. Both acquire a lock of their own while they hold the GIL, and make objects
under it. If this starts the garbage collection, a finalizer may let another thread run, which would hold the GIL and
wait for that lock forever. With this lock of Python, the other thread waits earlier, without the GIL."""
_seen: tuple[int, Watched | None] = 0, None
"""Number of modules, and the generators that were watched then."""
_join = b"".join
_python: Any = random._inst


class _Python:
    name = "random"

    def views(self) -> list[memoryview]:
        """The memory that changes with each draw; an error, or nothing, if this memory is not known."""
        # CPython stores the place and then the words. The place and the first word change with each draw, the last word
        # with each seed. The number that Python keeps for `gauss` is not in this memory.
        address = id(_python) + object.__basicsize__
        *state, place = random.getstate()[1]
        if ctypes.string_at(address, 4 + _BYTES) != np.array([place, *state], np.uint32).tobytes():
            return []
        return [_view(address, 8), _view(address + _BYTES, 4)]

    def exact(self) -> Any:
        """A mark that needs no knowledge of the memory."""
        return random.getstate()

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
        self.bits: Any = None
        self._address = 0

    def views(self) -> list[memoryview]:
        self.bits, self._address = self._rand._bit_generator, 0
        if not isinstance(self.bits, np.random.MT19937) or type(self._rand) is not np.random.RandomState:
            return []
        # The second of two normal numbers is kept. Drawing this number only clears a flag of the `RandomState`.
        known: Any = np.random.RandomState(0)

        def keep(keeps: bool) -> bytes:
            known.set_state({**known.get_state(legacy=False), "has_gauss": int(keeps)})
            return ctypes.string_at(id(known), type(known).__basicsize__)

        [flag] = _flags(keep)
        # Numpy's interface for ctypes: uint32 key[624], int pos. The last word and the place change.
        self._address = self.bits.ctypes.state_address
        return [_view(self._address + _BYTES - 4, 8), _view(id(self._rand) + flag, 1)]

    def is_replaced(self) -> bool:
        """Whether `set_bit_generator` was called since the views were made."""
        return self._rand._bit_generator is not self.bits

    def exact(self) -> Any:
        return str(np.random.get_state(legacy=False))

    def save(self) -> Any:
        words = ctypes.string_at(self._address, _BYTES + 4) if self._address else None
        return np.random.get_state(legacy=False), words

    def restore(self, saved: Any) -> None:
        state, words = saved
        if state["has_gauss"] or words is None or self.is_replaced():
            np.random.set_state(state)
            return
        # Ten times as fast as `set_state`: drop the number that numpy keeps, and restore the words.
        np.random.seed(0)
        ctypes.memmove(self._address, words, len(words))

    def seed(self, seed: int) -> None:
        np.random.seed(seed & 0xFFFFFFFF)


class _OfLibrary:
    """The generator of PyTorch or OneFlow, each of which is seeded with other numbers than numpy's."""

    def __init__(self, name: str, seed_offset: int) -> None:
        self.name, self._seed_offset = name, seed_offset
        self._generator: Any = sys.modules[name].default_generator

    def exact(self) -> Any:
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


class _Torch(_OfLibrary):
    def views(self) -> list[memoryview]:
        torch = sys.modules["torch"]
        known = torch.Generator()
        saved = known.get_state().numpy()
        words = saved[24:].view(np.uint64)[:_WORDS].astype(np.uint32).tobytes()
        with open("/proc/self/mem", "rb", buffering=0) as memory:  # Memory that is not there is not read.
            start = os.pread(memory.fileno(), len(saved), known._cdata).find(words)
        if start < 0:
            return []

        def keep(keeps: bool) -> bytes:
            saved[[*_TORCHS_FLAGS]] = keeps
            known.set_state(torch.from_numpy(saved))
            return ctypes.string_at(known._cdata + start + _BYTES, 32)

        first, last = _flags(keep)
        # The place is before the words. It changes with each draw, and the first word with each seed.
        address = self._generator._cdata + start
        return [_view(address - 4, 8), _view(address + _BYTES + first, last + 1 - first)]


class _Flow(_OfLibrary):
    """OneFlow's. After `restore`, it continues some hundred numbers later, because OneFlow shows no exact place."""

    def save(self) -> Any:
        return None if is_worker_process() else super().save()

    def restore(self, state: Any) -> None:
        if state is not None:
            super().restore(state)


def _views_of(generator: Any) -> list[memoryview]:
    try:
        return generator.views()
    except (AttributeError, OSError, TypeError, ValueError):
        return []


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address))


def _flags(keep: Callable[[bool], bytes]) -> list[int]:
    """The places in the memory that `keep` returns of the flags that it sets and clears."""
    values = zip(keep(False), keep(True), keep(False))
    return [place for place, each in enumerate(values) if each == (0, 1, 0)]


class Watched:
    """The generators whose marks show whether they have moved.

    If the memory of one of them is not as expected, the marks are whole states, which takes ten times as long.
    """

    def __init__(self, has_torch: bool) -> None:
        self._numpy = _Numpy()
        self.generators: tuple[Any, ...] = (_Python(), self._numpy, *([_Torch("torch", 1)] if has_torch else []))
        self._last: tuple[Any, list[Any]] = None, []
        """Marks of the generators, and their states, which are valid as long as the marks do not change."""
        self._find_memory()

    def _find_memory(self) -> None:
        parts = [_views_of(generator) for generator in self.generators]
        ends = np.cumsum([0, *(sum(map(len, part)) for part in parts)]).tolist()
        self._parts = [*map(slice, ends, ends[1:])]
        self._views = [view for part in parts for view in part] if all(parts) else None

    def marks(self) -> Any:
        """The marks of all generators, to be compared."""
        if self._views is None:
            return [generator.exact() for generator in self.generators]
        return _join(self._views), _python.gauss_next

    def moved(self, before: Any, after: Any) -> list[bool]:
        """Whether each generator has moved between two calls of `marks`."""
        if type(before) is not type(after):
            return [True] * len(self.generators)
        if type(before) is list:
            return [*map(operator.ne, before, after)]
        moved = [before[0][part] != after[0][part] for part in self._parts]
        return [moved[0] or before[1] != after[1], *moved[1:]]

    def marks_and_states(self, beside_others: bool) -> tuple[Any, list[Any]]:
        """Marks and states of the generators.

        Args:
            beside_others: whether other threads may draw meanwhile. The marks belong to the states in any case.
        """
        last, marks = self._last, self.marks()
        if last[0] == marks:
            return last
        if self._numpy.is_replaced():
            self._find_memory()
            marks = self.marks()
        while True:
            before, states = marks, [generator.save() for generator in self.generators]
            marks = self.marks()
            if marks == before or not beside_others:
                self._last = last = marks, states
                return last


@cache
def _watched(has_torch: bool, has_flow: bool) -> Watched:
    return Watched(has_torch)


@cache
def flow_generator() -> _Flow:
    """OneFlow's generator."""
    return _Flow("oneflow", 2)


def watched() -> Watched:
    """The generators whose marks show whether they have moved; other ones after PyTorch or OneFlow was imported."""
    global _seen
    modules, generators = _seen
    if len(sys.modules) != modules or generators is None:
        modules, has_torch = len(sys.modules), hasattr(sys.modules.get("torch"), "default_generator")
        _seen = modules, generators = modules, _watched(has_torch, has_flow())
    return generators


def generators_in_turn() -> AbstractContextManager[Any]:
    """The lock for code that reads or seeds the generators of PyTorch or OneFlow, in one thread at a time."""
    return _generator_lock


def has_flow() -> bool:
    """Whether OneFlow can be used here: it is imported, and no fork has ended its threads."""
    return not _flow_was_forked and hasattr(sys.modules.get("oneflow"), "default_generator")


def present() -> tuple[Any, ...]:
    """The generators whose libraries are imported."""
    generators = watched().generators
    return (*generators, flow_generator()) if has_flow() else generators


def _after_fork() -> None:
    global _flow_was_forked
    _flow_was_forked = "oneflow" in sys.modules


os.register_at_fork(after_in_child=_after_fork)
