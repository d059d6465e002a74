"""The random generators that all code shares (Python's, numpy's, torch's, OneFlow's) while samples are read.

What a dataset draws from them must depend on (seed, epoch, index) alone, and must not change the draws of the training
loop. So each reading is watched. If a generator has moved, it is restored, and the samples are read again one by one,
with the generators seeded for each sample. From then on, the samples of this dataset are read in this way at once. For
a dataset that draws from none of them, the check compares a few bytes.

OneFlow 0.9 does not show whether its generator has moved, and a new generator without a seed moves none. So calls of
OneFlow's functions that draw, and what asks the system for a seed, are watched, but only in the first, second, fourth,
eighth reading, and so on.
"""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Callable, TypeVar

import numpy as np

from libai_data.data.fork_lock import ForkLock
from libai_data.data.random.drawing_streams import streams_draw, streams_stopped
from libai_data.data.random.generator_states import Watched, flow_generator, has_flow, present, watched
from libai_data.data.random.hashing import combine64
from libai_data.data.random.sample_random import is_worker_process, reading_now, sample_generator, this_thread

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

HOW_TO_DRAW = "draw from libai_data.data.random.sample_generator() instead, or in the function of a RandomMap"
_EARLY = 3
_MOST_ATTEMPTS = 8
_AMBIGUOUS = "sample_generator"
_PYTHONS_SEED = random.Random.seed.__code__
_DRAWS = re.compile(
    "rand.*|normal_?|uniform_|exponential_|bernoulli_?|multinomial|.*dropout.*|poisson|.*_normal_|.*ic_|cauchy_"
)

_have_shared = False
"""Whether any thread of this process has ever shared the generators."""
_modules = sys.modules
_seeding_lock = ForkLock()
_watching: set[int] = set()
"""The threads that restore generators after what they read now."""
_Begun = tuple[Watched, Any, list[Any], int, bool, "_Watch | None", int]
"""A reading that began: the generators, their marks and states, the ambiguities, whether others read, what watches the
calls, and the number of readings before."""


class GlobalDraws:
    """What the samples of one dataset draw from global generators."""

    def __init__(self, whose: str) -> None:
        self.found: set[str] = set()
        self.seeds = False
        self.whose = whose
        self.unseeded: tuple[int, int, int] | None = None
        """(seed, epoch, index) of the last sample that seemed to draw from a generator without a seed."""
        self._readings = 0
        self._has_drawn_nothing = False
        """Whether a reading that was repeated, because a generator had moved, moved none."""

    @property
    def needs_one_thread(self) -> bool:
        """Whether no other thread of this process may draw while these samples are read."""
        return bool(self.found - {_AMBIGUOUS}) or self.seeds

    def around(self, read: Callable[[], Result], key: tuple[int, int, int] | None = None) -> Result:
        """Read samples.

        Args:
            read: reads the samples. It is called again if they turn out to draw.
            key: (seed, epoch, index) of the sample; None for several samples. If `found` is not empty, `read` must then
                read each sample by an `around` of its own.

        Returns:
            What `read` returned. All its draws came from generators that were seeded for the sample.
        """
        if this_thread.shares:
            return self._around_beside_others(read)
        if not streams_draw():
            return self._around(read, key)
        readings = self._readings + 1
        if not self.found and readings & (readings - 1):  # Most readings need not wait for the streams.
            self._readings = readings
            return read()
        with streams_stopped():
            return self._around(read, key)

    def _around(self, read: Callable[[], Result], key: tuple[int, int, int] | None) -> Result:
        thread = threading.get_ident()
        is_within = thread in _watching
        attempt, first = 0, None
        try:
            _watching.add(thread)
            while True:
                modules, ambiguous = len(_modules), this_thread.ambiguities
                generators = watched()
                before, states = generators.marks_and_states(_have_shared)
                # Of two threads, the one that begins later sees the other one here, or the one that ends later does.
                is_beside_others = len(_watching) > 1 and _others_watch()
                self._readings = readings = self._readings + 1
                is_due = attempt > 0 or not readings & (readings - 1)
                watch = _Watch(self, key, generators, is_due) if is_due or self.found else None
                if first is not generators:
                    first, first_states = generators, states
                begun = generators, before, first_states, ambiguous, is_beside_others, watch, attempt
                try:
                    result = read()
                except BaseException as error:
                    if not self._end(begun, has_failed=True) or not isinstance(error, Exception):
                        raise
                else:
                    has_moved = generators.marks() != before or len(_modules) != modules
                    if not (has_moved or watch or this_thread.ambiguities != ambiguous or this_thread.has_seeded):
                        return result
                    if not self._end(begun):
                        return result
                attempt += 1
        finally:
            if not is_within:
                _watching.discard(thread)
            elif self.needs_one_thread:
                # The enclosing reading finds the generators unchanged, so only this flag shows the draws.
                this_thread.has_seeded = True

    def _end(self, begun: _Begun, has_failed: bool = False) -> bool:
        """Restore the generators; returns whether to read again.

        Other threads may draw, too, such as the training loop while a stream reads by a loader of its own. To restore a
        generator would undo their draws. So, beside other threads, a reading has drawn only if a call was noticed, or
        if the generator moved whenever the samples were read. A reading that has failed is repeated once at most to
        notice calls, because it may have waited long, such as for a store that does not answer.
        """
        generators, before, states, ambiguous, is_beside_others, watch, attempt = begun
        drawn: set[str] = set()
        seeded: Collection[str] = ()
        noticed: Collection[str] = ()
        if watch is not None:
            watch.end()
            drawn, seeded, noticed = watch.drawn, watch.seeded, watch.noticed
        if this_thread.ambiguities != ambiguous:
            this_thread.ambiguities = ambiguous
            drawn.add(_AMBIGUOUS)
        if this_thread.has_seeded:
            self.seeds, this_thread.has_seeded = True, False
        moved = generators.moved(before, generators.marks())
        may_be_others = threading.active_count() > 1 and (attempt < _MOST_ATTEMPTS or self._has_drawn_nothing)
        is_unclear = False
        for generator, has_moved, state in zip(generators.generators, moved, states):
            if has_moved and may_be_others and generator.name not in (*seeded, *noticed):
                is_unclear = True
            elif has_moved or generator.name in seeded:
                generator.restore(state)
                drawn.add(generator.name)
        self._has_drawn_nothing |= attempt > 0 and not any(moved)
        if drawn - {_AMBIGUOUS} and (is_beside_others or _others_watch()):
            warn_once(
                "%s was read while another thread read by another loader, and one of them drew from a global random "
                "generator, which all threads share. So samples may get other numbers in each run; %s, or read in one "
                "thread at a time",
                self.whose,
                HOW_TO_DRAW,
            )
        # Libraries that the reading itself has imported were not watched.
        imported = watched() is not generators
        # When the samples are read again, calls are noticed.
        notices = watch is not None and watch.notices
        is_over = attempt or notices if has_failed else attempt and self._has_drawn_nothing
        return self._learn(drawn) or imported or (is_unclear and not is_over)

    def _around_beside_others(self, read: Callable[[], Result]) -> Result:
        """`around` in a thread that shares the generators. It sees that they moved, but not which thread moved them."""
        generators, ambiguous = watched(), this_thread.ambiguities
        marks, _ = generators.marks_and_states(beside_others=True)
        try:
            result = read()
            if this_thread.ambiguities != ambiguous:
                this_thread.ambiguities = ambiguous
                if _AMBIGUOUS not in self.found:
                    self.found.add(_AMBIGUOUS)
                    result = read()
        finally:
            if watched() is not generators or generators.marks() != marks:
                this_thread.has_drawn = True
        return result

    def _learn(self, drawn: set[str]) -> bool:
        """Note the names of the generators that a reading drew from; returns whether to read again."""
        new = drawn - self.found
        if "oneflow" in new and not (is_worker_process() and self._readings < _EARLY):
            warn_once(
                "%s draws from OneFlow's generator, which can neither be watched nor put back exactly. From now on it "
                "is seeded for each sample; samples that were read before may have got other numbers, and in the "
                "trainer's own process the model's generator skips numbers; %s",
                self.whose,
                HOW_TO_DRAW,
            )
        self.found |= new
        return bool(new)


class _Watch:
    """Seeds the generators for one sample of a dataset that is known to draw; in some readings, watches calls."""

    seeded: Collection[str] = ()
    notices = False
    _flow_state: Any = None

    def __init__(self, draws: GlobalDraws, key: tuple[int, int, int] | None, generators: Watched, is_due: bool) -> None:
        self._draws = draws
        self.drawn: set[str] = set()
        self.noticed: set[str] = set()
        """Generators whose methods were called. Not all calls can be noticed, such as those by `map`."""
        if key is not None and draws.found:
            self._seed(draws.found, combine64(*key), generators)
        if is_due and sys.getprofile() is None:
            self.notices, self._outer = True, reading_now()
            sys.setprofile(self._notice)

    def _seed(self, names: Collection[str], seed: int, generators: Watched) -> None:
        self.seeded = names
        for generator in generators.generators:
            if generator.name in names:
                generator.seed(seed)
        if "oneflow" in names and has_flow():
            self._flow_state = flow_generator().save()
            flow_generator().seed(seed)

    def _notice(self, frame: Any, event: str, function: Any) -> None:
        if event == "call":
            if frame.f_code is _PYTHONS_SEED and frame.f_locals["a"] is None:
                self._note_unseeded(frame)
        elif function is os.urandom:  # Numpy's generators without a seed call it.
            self._note_unseeded(frame)
        elif event == "c_call":
            owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
            module = str(getattr(function, "__module__", None) or type(owner).__module__)
            if owner is random._inst:
                self.noticed.add("random")
            elif owner is np.random.mtrand._rand or module == "numpy.random.mtrand":
                self.noticed.add("numpy.random")
            elif module.startswith("torch") and (_DRAWS.fullmatch(name) or name == "manual_seed"):
                self.noticed.add("torch")
            elif module.startswith("oneflow") and _DRAWS.fullmatch(name) and has_flow():
                self.drawn.add("oneflow")

    def _note_unseeded(self, frame: Any) -> None:
        while frame.f_back is not None and frame.f_globals is vars(random):
            frame = frame.f_back
        reading = reading_now()
        while reading is not None and reading._outer is not self._outer:
            reading = reading._outer
        # Numpy makes a seed also for a generator with a key, such as that of `sample_generator`.
        if reading is not None and reading.keys and frame.f_globals is not sample_generator.__globals__:
            self._draws.unseeded = reading.keys[0]

    def end(self) -> None:
        if self.notices:
            sys.setprofile(None)
        if self._flow_state is not None:
            flow_generator().restore(self._flow_state)


def _others_watch() -> bool:
    return len(_watching) > 1 and not _watching <= {threading.get_ident(), *this_thread.callers}


def share_generators(shares: bool, callers: frozenset[int] = frozenset()) -> None:
    """Set whether this thread shares the generators with other threads that read, and so must not move them.

    Args:
        shares: whether other threads read at the same time.
        callers: the threads that wait meanwhile; see `callers_of_a_reader`.
    """
    global _have_shared
    this_thread.shares, this_thread.callers, _have_shared = shares, callers, _have_shared or shares


def callers_of_a_reader() -> frozenset[int]:
    """The threads that wait if this thread waits for another one that reads for it: this thread, and its callers."""
    return this_thread.callers | {threading.get_ident()}


def reads_beside_others() -> bool:
    """Whether this thread shares the generators, so that other threads may have changed what its samples drew."""
    return this_thread.shares


def take_has_drawn() -> bool:
    """Whether any thread has moved a global generator while this thread read, since the last call."""
    has_drawn, this_thread.has_drawn = this_thread.has_drawn, False
    return has_drawn


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all global generators for the block, and restore them afterwards; for one thread at a time."""
    this_thread.has_drawn = this_thread.has_seeded = True
    if this_thread.shares:
        # The result of the block is not used.
        yield
        return
    with streams_stopped(), _seeding_lock:
        generators = present()
        saved = [generator.save() for generator in generators]
        for generator in generators:
            generator.seed(seed)
        profile = sys.getprofile()
        is_watched = getattr(profile, "__func__", None) is _Watch._notice
        if is_watched:  # There is nothing to notice here.
            sys.setprofile(None)
        try:
            yield
        finally:
            if is_watched:
                sys.setprofile(profile)
            for generator, state in zip(generators, saved):
                generator.restore(state)


@cache
def warn_once(message: str, *arguments: Any) -> None:
    """Log a warning, once in this process."""
    logger.warning(message, *arguments)


os.register_at_fork(after_in_child=_watching.clear)
