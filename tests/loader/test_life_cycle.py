"""The life of a loader: whatever users do to it, it gives what the reference loader gives, or an error that says why.

`LIBAI_DATA_LIFE_STEPS=100000 python -m pytest -s tests/loader/test_life_cycle.py` takes 100,000 steps.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import libai_data
from libai_data.data.samplers.order import Order
from libai_data.errors import DataPipelineError, PassError, PeerError, SampleError
from libai_data.iterables import from_iterable
from libai_data.structures import batch_info
from tests.deadline import wait_until
from tests.loader.interrupting import interrupted_at
from tests.loader.reference import Ended, Expected, ReferenceLoader, State
from tests.loader.streams import descriptors, loader_threads
from tests.properties import is_long_run

PACKAGE = Path(libai_data.__file__).parent
TRACED = tuple(str(PACKAGE / name) for name in ("loader", "data/samplers", "delivery", "iterables"))
assert all(map(os.path.isdir, TRACED))
SAMPLES = 11
STEPS = 50
STEPS_OF_SHORT_RUN, STEPS_OF_LONG_RUN = 3_000, 12_000
PHASES = [phase for phase in Phase if phase is not Phase.shrink]
"""To find a shorter sequence that fails would take many minutes where processes are started."""

SEED = 3
LINES = st.one_of(st.integers(1, 80), st.integers(1, 500))
"""How many lines a loader runs until it is interrupted; if it needs fewer, it is not."""


class Samples:
    """Samples that tell which they are; one may be broken for a while."""

    def __init__(self, nested: bool) -> None:
        self.nested = nested
        self.broken = -1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise OSError(f"sample {index} is broken")
        return {"x": {"y": np.full(5, index)}} if self.nested else {"y": np.full(5, index)}


class Life(RuleBasedStateMachine):
    """Does to a loader, step by step, what users do; `make` decides which loader."""

    steps = 0
    process = False

    def __init__(self) -> None:
        super().__init__()
        self.iterators: dict[int, Any] = {}
        self.unsure: set[int] = set()
        """Iterators that an interrupt may have ended, or not."""
        self.may_be_over: set[int] = set()
        """Those of them that had noted the end of their pass."""
        self.over: set[int] = set()
        self.states: list[tuple[dict[str, Any], State]] = []
        self.kept: list[tuple[Any, list[int]]] = []
        self.loader: Any = None

    @initialize(
        is_stream=st.booleans(),
        ends=st.sampled_from(["short", "pad", "drop", "cycle"]),
        size=st.integers(1, 6),
        shuffle=st.booleans(),
        nested=st.booleans(),
        readers=st.sampled_from(["every_rank", "node", "rank0"]),
        workers=st.sampled_from([0, 0, 2]),
        prefetch=st.integers(1, 3),
    )
    def make(
        self,
        is_stream: bool,
        ends: str,
        size: int,
        shuffle: bool,
        nested: bool,
        readers: str,
        workers: int,
        prefetch: int,
    ) -> None:
        self.before, self.threads_before = descriptors(), loader_threads()
        gc.freeze()  # Hypothesis remembers all lives; each full collection would go through them.
        samples = self.samples = Samples(nested)
        self.is_stream = is_stream = is_stream and not self.process
        self.is_shared = readers != "every_rank"
        order = Order(SAMPLES, SEED, shuffle or is_stream)

        def order_of(epoch: int) -> list[int]:
            return list(map(int, order.locate(np.arange(epoch * SAMPLES, (epoch + 1) * SAMPLES))[1]))

        def stream(epoch: int) -> Iterator[Any]:
            return (samples[index] for index in order_of(epoch))

        options: dict[str, Any] = {"ends": ends, "readers": readers, "prefetch": prefetch}
        if not is_stream:
            options.update(shuffle=shuffle, seed=SEED, num_workers=2 if self.process else workers)
            options["worker_type"] = "process" if self.process else "thread"
            options["start_method"] = "fork"
        self.new_loader = lambda: from_iterable(stream if is_stream else samples, size, **options)
        self.loader = self.new_loader()
        self.reference = ReferenceLoader(order_of, SAMPLES, size, ends, is_stream)
        self.states = [(self.loader.state_dict(), self.reference.state)]

    def teardown(self) -> None:
        if self.loader is None:
            return
        for batch, rows in self.kept:
            assert rows_of(batch) == rows, "a batch that the user keeps has changed"
        self.loader.close()
        self.iterators.clear()
        self.kept.clear()
        self.loader = None
        gc.collect()
        wait_until(
            lambda: loader_threads() <= self.threads_before and descriptors() <= self.before,
            "end of what was started and opened",
        )

    def place(self) -> State:
        """Where the loader says that it stands, as the reference does."""
        state = json.loads(json.dumps(self.loader.state_dict()))
        position = state["position"]
        if self.reference.ends == "cycle":
            return 0, position
        return (state["epoch"], position) if "epoch" in state else divmod(position, SAMPLES)

    def same_place(self, found: State, expected: State) -> bool:
        # The end of an epoch is the beginning of the next one.
        ends = {(epoch, taken) if taken < SAMPLES else (epoch + 1, 0) for epoch, taken in (found, expected)}
        return found == expected or (self.reference.ends != "cycle" and len(ends) == 1)

    def check_place(self) -> None:
        type(self).steps += 1
        assert self.same_place(self.place(), self.reference.state), (self.place(), self.reference.state)

    def expect(self, number: int, batch: Any, expected: Optional[Expected]) -> None:
        if expected is None:
            assert batch is None
            self.over.add(number)
            return
        info = batch_info(batch)
        assert info is not None and batch is not None
        assert (info.valid, info.size) == (len(expected.counted), expected.size)
        assert info.epoch == expected.epoch
        rows = rows_of(batch)
        assert rows[: info.valid] == expected.counted
        assert set(rows[info.valid :]) <= {expected.counted[-1]}

    def take_one(self, number: int) -> None:
        iterator = self.iterators[number]
        if number in self.over:
            assert next(iterator, None) is None
            return
        if number in self.unsure:
            self.unsure.discard(number)
            try:
                batch = next(iterator, None)
            except PassError:
                self.reference.dead.add(number)
                return
            if batch is None and number in self.may_be_over:
                self.over.add(number)
                return
            self.reference.dead.discard(number)
            self.expect(number, batch, self.reference.take(number))
            return
        try:
            expected = self.reference.take(number)
        except Ended:
            with pytest.raises(DataPipelineError):
                next(iterator)
            return
        batch = next(iterator, None)
        self.expect(number, batch, expected)
        if batch is not None and self.reference.taken % 5 == 0 and len(self.kept) < 12:
            self.kept.append((batch, rows_of(batch)))

    def fresh(self) -> None:
        """A new loader, which goes on where the old one stands."""
        state = self.loader.state_dict()
        self.loader.close()
        self.loader = self.new_loader()
        self.loader.load_state_dict(json.loads(json.dumps(state)))
        self.reference.load(self.reference.state)

    @rule()
    def begin(self) -> None:
        self.iterators[self.reference.begin()] = iter(self.loader)
        self.check_place()

    # What is drawn must not depend on whether an interrupt came in time, so it does not depend on the iterators.
    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        for _ in range(count if self.iterators else 0):
            self.take_one(max(self.iterators))
        self.check_place()

    @rule(which=st.integers(0, 50))
    def take_of_any_iterator(self, which: int) -> None:
        if self.iterators:
            self.take_one(sorted(self.iterators)[which % len(self.iterators)])
        self.check_place()

    @rule()
    def whole_pass(self) -> None:
        self.begin()
        while self.reference.ends != "cycle" and max(self.iterators) not in self.over:
            self.take_one(max(self.iterators))
        self.check_place()

    @rule()
    def save(self) -> None:
        self.states.append((json.loads(json.dumps(self.loader.state_dict())), self.reference.state))
        self.check_place()

    @rule(data=st.data(), into_a_new_loader=st.booleans())
    def load(self, data: st.DataObject, into_a_new_loader: bool) -> None:
        if into_a_new_loader:
            self.fresh()
        state, place = data.draw(st.sampled_from(self.states))
        self.loader.load_state_dict(state)
        self.reference.load(place)
        self.check_place()

    @rule(epoch=st.integers(0, 4))
    def set_epoch(self, epoch: int) -> None:
        if self.is_stream and self.reference.ends == "cycle":
            with pytest.raises(DataPipelineError, match="has no epochs"):
                self.loader.set_epoch(epoch)
            return
        self.loader.set_epoch(epoch)
        self.reference.set_epoch(epoch)
        self.check_place()

    @rule(from_another_thread=st.booleans())
    def close(self, from_another_thread: bool) -> None:
        if from_another_thread:
            thread = threading.Thread(target=self.loader.close)
            thread.start()
            thread.join()
        else:
            self.loader.close()
        self.reference.end_iterators()
        if self.is_shared:
            with pytest.raises(PeerError, match="was closed"):
                iter(self.loader)
            self.fresh()
        self.check_place()

    # A fork whose start is interrupted before its number is noted ends with the loader, but nobody waits for it.
    @precondition(lambda self: not self.process)
    @rule(line=LINES)
    def interrupt_begin(self, line: int) -> None:
        newest = self.reference.newest
        try:
            with interrupted_at(line, TRACED):
                iterator = iter(self.loader)
        except KeyboardInterrupt:
            # It has begun no pass; the older iterator may be over.
            self.unsure.update({newest} & self.iterators.keys() - self.reference.dead)
        else:
            self.iterators[self.reference.begin()] = iterator
        self.check_place()

    @rule(line=LINES)
    def interrupt_take(self, line: int) -> None:
        number = max(self.iterators, default=-1)
        if number < 0 or number in self.over or number in self.unsure or number in self.reference.dead:
            return
        ended = object()
        try:
            with interrupted_at(line, TRACED):
                batch = next(self.iterators[number], ended)
        except KeyboardInterrupt:
            self.unsure.add(number)
            if self.reference.peek() is None and self.place() == (self.reference.epoch + 1, 0):
                # It has noted the end of the pass, which nobody has heard of.
                self.reference.take(number)
                self.may_be_over.add(number)
        else:
            self.expect(number, None if batch is ended else batch, self.reference.take(number))
        self.check_place()

    @precondition(lambda self: not self.process)
    @rule(index=st.integers(0, SAMPLES - 1))
    def break_a_sample(self, index: int) -> None:
        """A pass in which a sample cannot be read: its batch fails, again and again, and those before it do not."""
        self.begin()
        number = max(self.iterators)
        self.samples.broken = index
        for _ in range(4):
            expected, before = self.reference.peek(), vars(self.reference).copy()
            if not self.is_stream and expected is not None and index in expected.counted:
                self.fails(number)
                break
            try:
                self.take_one(number)
            except SampleError:
                # A stream was read ahead; it fails where the source does.
                assert self.is_stream
                vars(self.reference).update(before)
                self.fails(number)
                break
            if number in self.over:
                break
        self.samples.broken = -1
        if number not in self.reference.dead:
            # What was read ahead may have failed too.
            self.fresh() if self.is_stream else self.begin()
        self.check_place()

    def fails(self, number: int) -> None:
        for _ in range(2):
            with pytest.raises(SampleError, match="is broken"):
                next(self.iterators[number])
        self.reference.dead.add(number)


class LifeWithProcesses(Life):
    """As above, with worker processes."""

    process = True


def rows_of(batch: Any) -> list[int]:
    """The numbers of a batch's rows, all of whose values agree."""
    values = (batch.y if batch.has("y") else batch.x["y"]).tensor.numpy()
    assert (values == values[:, :1]).all()
    return [int(row[0]) for row in values]


@pytest.mark.watchdog(4 * 3600)
@pytest.mark.parametrize(("life", "share"), [(Life, 0.96), (LifeWithProcesses, 0.04)], ids=["in-process", "processes"])
def test_a_loader_does_what_the_reference_does_through_any_sequence_of_steps(life: Any, share: float) -> None:
    default = STEPS_OF_LONG_RUN if is_long_run() else STEPS_OF_SHORT_RUN
    steps = int(os.environ.get("LIBAI_DATA_LIFE_STEPS", default))
    # Some steps find nothing to do, and are not counted. Draws depend on what else is imported.
    lives = round(1.5 * share * steps / STEPS) + 2
    life.steps = 0
    run_state_machine_as_test(
        life,
        settings=settings(max_examples=lives, stateful_step_count=STEPS, phases=PHASES),
    )
    print(f"{life.__name__}: {life.steps} steps in {lives} lives")
    assert life.steps >= share * steps
