"""What a dataset keeps that can make its samples differ between processes or runs."""

from __future__ import annotations

import dis
import os
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from functools import cache, partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Callable

import numpy as np

from libai_data.data.nesting import TEXT
from libai_data.data.random.global_generators import HOW_TO_DRAW, warn_once
from libai_data.launch.same_interpreter import has_random_hashes

_MOST_OBJECTS = 1000
_MOST_ITEMS = 20
_HASHING = {"hash", "set", "frozenset"}
_MAKES_SET = {"BUILD_SET", "SET_ADD"}
_NOT_READING = {"__init__", "__hash__", "__eq__", "__repr__"}
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_LIBRARIES = *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")), _PACKAGE + os.sep


def _kept_objects(dataset: Any) -> Iterator[tuple[str, Any]]:
    """The objects that a dataset keeps, each with its name, such as `dataset.rng`; the first ones of many."""
    known = {id(random._inst), id(np.random.mtrand._rand)}
    waiting: deque[tuple[str, Any]] = deque([("dataset", dataset)])
    while waiting and len(known) < _MOST_OBJECTS:
        name, thing = waiting.popleft()
        # `Albumentations`, for example, seeds the generators of its transform.
        if id(thing) in known or getattr(type(thing), "seeds_generators", False):
            continue
        known.add(id(thing))
        yield name, thing
        if isinstance(thing, dict):
            waiting.extend((f"{name}[{key!r}]", value) for key, value in islice(thing.items(), _MOST_ITEMS))
        elif isinstance(thing, (list, tuple)):
            # Not a slice: a list may have a `__getitem__` of its own, for single indices.
            items = islice(iter(thing), _MOST_ITEMS)
            waiting.extend((f"{name}[{place}]", value) for place, value in enumerate(items))
        elif not isinstance(thing, (type, ModuleType, FunctionType)):
            waiting.extend((f"{name}.{key}", value) for key, value in getattr(thing, "__dict__", {}).items())


def own_generators(dataset: Any) -> list[str]:
    """Names of a dataset's own random generators, such as `dataset.rng`, which cannot be seeded for a sample."""
    kinds: tuple[type, ...] = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
    kinds += tuple(filter(None, [getattr(sys.modules.get("torch"), "Generator", None)]))
    return [name for name, thing in _kept_objects(dataset) if isinstance(thing, kinds)]


def warn_of_own_generators(dataset: Any) -> None:
    """Warn once about the random generators that a dataset keeps."""
    kept = own_generators(dataset)
    if kept:
        warn_once(
            "%s keeps a random generator of its own (%s). What it draws from this generator depends on which worker "
            "reads the samples, and a resume does not restore the generator; %s",
            type(dataset).__name__,
            ", ".join(kept[:3]),
            HOW_TO_DRAW,
        )


def random_hashes_of(dataset: Any) -> str:
    """What of a dataset may depend on the hash seed of this process, if Python chose the seed at random; or "".

    These are sets of texts, and code of users that makes sets or calls `hash`.
    """
    if not has_random_hashes():
        return ""
    found: list[str] = []
    known: set[FunctionType] = set()
    methods_of: Callable[[Any], list[FunctionType]] = cache(_methods_of)  # Many objects have one class.
    for name, thing in _kept_objects(dataset):
        is_set = isinstance(thing, (set, frozenset)) and len(thing) > 1
        if is_set and any(isinstance(item, TEXT) for item in islice(thing, _MOST_ITEMS)):
            found.append(name)
        called = thing.func if isinstance(thing, partial) else thing
        called = called.__func__ if isinstance(called, MethodType) else called
        for function in [called] if isinstance(called, FunctionType) else methods_of(type(called)):
            if _hashes(function, known):
                found.append(f"{function.__qualname__}()")
    return ", ".join(found[:3])


def warn_of_random_hashes(name: str, hashes: str) -> None:
    """Warn once that other programs read a dataset of this name, if `random_hashes_of` has found something."""
    if hashes:
        warn_once(
            "%s may use hashes of texts (%s). Python chose the hash seed of this process at random, so in the worker "
            "programs, and in each run, hash() has another value and sets have another order. If samples depend on "
            "them, sort the sets, replace hash by zlib.crc32, or start Python with PYTHONHASHSEED=0",
            name,
            hashes,
        )


def _methods_of(kind: type) -> list[FunctionType]:
    """The methods of a class that may run when samples are read."""
    members = [value for each in kind.__mro__ for name, value in vars(each).items() if name not in _NOT_READING]
    functions = [value.fget if isinstance(value, property) else value for value in members]
    functions = [each.__func__ if isinstance(each, (classmethod, staticmethod)) else each for each in functions]
    return [each for each in functions if isinstance(each, FunctionType)]


def _hashes(function: FunctionType, known: set[FunctionType]) -> bool:
    """Whether a user's function, or a user's function of its module that it calls, makes sets or calls `hash`."""
    if function in known or len(known) > _MOST_OBJECTS or function.__code__.co_filename.startswith(_LIBRARIES):
        return False
    known.add(function)
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        for each in dis.get_instructions(code):
            if each.opname in _MAKES_SET or (each.opname == "LOAD_GLOBAL" and each.argval in _HASHING):
                return True
            called = function.__globals__.get(each.argval) if each.opname == "LOAD_GLOBAL" else None
            if isinstance(called, FunctionType) and _hashes(called, known):
                return True
    return False
