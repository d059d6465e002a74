"""States of random generators, asked for by several threads."""

from __future__ import annotations

import random
import sys
from typing import Any, Callable

import numpy as np
import pytest

from libai_data.data.random import generator_states
from libai_data.data.random.generator_states import Watched, watched
from tests.deadline import run_to_end
from tests.properties import slowly

SCRIPT = """
import gc, sys, threading, time
import {library}
from libai_data.data.random.generator_states import present
generators = [each for each in present() if each.name == {library!r}]
assert generators
# A finalizer that lets other threads run, as any may, wherever objects are made.
gc.callbacks.append(lambda phase, info: time.sleep(1e-6))
gc.set_threshold(5, 2, 2)
def seed():
    if {library!r} == "oneflow":
        from libai_data.engine.checkpoint.random_state import RandomStates
        from libai_data.engine.setup import seed_all
        states = RandomStates(oneflow.nn.Dropout())
        for number in range(5 * {times}):
            seed_all(number)
        states.gather(1)
threads = [threading.Thread(target=lambda: [generators[0].save() for _ in range({times})]) for _ in range(2)]
threads += [threading.Thread(target=seed) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("all have their states")
"""


@pytest.mark.parametrize(("library", "times"), [("torch", 5000), slowly("oneflow", 300)])
def test_threads_that_ask_for_a_state_while_garbage_is_collected_do_not_wait_for_ever(library: str, times: int) -> None:
    pytest.importorskip(library)
    code = SCRIPT.format(library=library, times=times)
    result = run_to_end([sys.executable, "-c", code])
    assert result.stdout == "all have their states\n", result.stderr


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_a_draw_of_another_thread_while_a_state_is_saved_hides_no_later_one(
    draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numpy makes two normal numbers at once and keeps the second, whose draw moves no word of the state."""
    generators = watched()
    numpys = next(each for each in generators.generators if each.name == "numpy.random")
    np.random.seed(draws)
    calls: list[object] = []

    def save() -> object:
        state = type(numpys).save(numpys)
        if not calls:
            np.random.normal(size=draws)
        calls.append(state)
        return state

    monkeypatch.setattr(numpys, "save", save)
    marks, _ = generators.marks_and_states(beside_others=True)
    np.random.normal()
    assert generators.marks() != marks
    assert calls


def test_a_kept_number_is_noticed_where_another_state_with_the_same_words_was_saved() -> None:
    generators = watched()
    numpys = next(each for each in generators.generators if each.name == "numpy.random")
    for normals in (2, 1):
        np.random.seed(0)
        np.random.normal(size=normals)  # The words are the same; after one number, the second is kept.
        marks, states = generators.marks_and_states(beside_others=False)
    expected = np.random.normal()
    assert generators.marks() != marks
    numpys.restore(states[generators.generators.index(numpys)])
    assert np.random.normal() == expected


DRAWS: dict[str, tuple[str, Callable[[], Any]]] = {
    "python": ("random", random.random),
    "gauss": ("random", lambda: random.gauss(0, 1)),
    "numpy": ("numpy.random", np.random.random),
    "normal": ("numpy.random", np.random.normal),
    "torch": ("torch", lambda: sys.modules["torch"].rand(1)),
    "torch's normal": ("torch", lambda: sys.modules["torch"].randn(1)),
}


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize(("name", "draw"), DRAWS.values(), ids=DRAWS.keys())
def test_each_draw_moves_the_mark_of_its_generator_until_the_state_is_restored(
    name: str, draw: Callable[[], Any], kept: int, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two normal numbers is kept for the next draw, which then moves only a flag."""
    pytest.importorskip("torch")
    if not is_known:
        monkeypatch.setattr(generator_states, "_views_of", lambda _: [])
    generators = Watched(has_torch=True)
    assert (generators._views is not None) == is_known
    names = [each.name for each in generators.generators]
    for each in generators.generators:
        each.seed(3)
    for _ in range(kept):
        draw()
    marks, states = generators.marks_and_states(beside_others=False)
    assert generators.marks() == marks
    for _ in range(2):
        draw()
        moved = generators.moved(marks, generators.marks())
        assert [each for each, has_moved in zip(names, moved) if has_moved] == [name]
        place = names.index(name)
        generators.generators[place].restore(states[place])
        assert generators.marks() == marks


def test_a_generator_of_numpy_that_is_replaced_is_watched_and_restored_too() -> None:
    generators = Watched(has_torch=False)
    numpys = generators.generators[1]
    before = np.random.get_bit_generator()
    try:
        for bits in (np.random.MT19937(5), np.random.PCG64(5), before):
            np.random.set_bit_generator(bits)
            marks, states = generators.marks_and_states(beside_others=False)
            drawn = np.random.random()
            assert generators.moved(marks, generators.marks()) == [False, True]
            numpys.restore(states[1])
            assert generators.marks() == marks and np.random.random() == drawn
    finally:
        np.random.set_bit_generator(before)
