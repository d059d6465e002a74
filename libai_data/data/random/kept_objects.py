"""What a dataset keeps that can make its samples differ between processes or runs."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from libai_data.data.nesting import TEXT
from libai_data.data.random.global_generators import HOW_TO_DRAW, warn_once

_MOST_OBJECTS = 1000
_MOST_ITEMS = 20


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


def warn_of_sets_of_text(dataset: Any) -> None:
    """Warn once about the sets of texts that a dataset keeps, for processes whose hash seeds differ."""
    kept = [
        name
        for name, thing in _kept_objects(dataset)
        if isinstance(thing, (set, frozenset)) and len(thing) > 1
        if any(isinstance(item, TEXT) for item in islice(thing, _MOST_ITEMS))
    ]
    if kept:
        warn_once(
            "%s keeps a set of texts (%s). Python chose the hash seed of this process at random, so the set has "
            "another order in the worker programs, and in each run. If samples depend on the order, sort the set, or "
            "start Python with PYTHONHASHSEED=0",
            type(dataset).__name__,
            ", ".join(kept[:3]),
        )
