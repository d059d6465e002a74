"""Slots: batches are views of shared memory, which comes back with the last of them, and never before."""

from __future__ import annotations

import logging
import os
import random
import resource
import sys
import threading
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.samplers import SingleRoundSampler
from libai_data.errors import SampleError
from libai_data.iterables import from_iterable
from libai_data.loader import BatchLoader
from libai_data.loader.arena import Arena, PrivateArena
from libai_data.loader.slots import Slot, SlotList, bytes_of, lay_out, views
from tests.deadline import run_to_end, stretched, wait_until
from tests.loader.sample_datasets import Failing, Fields, NumberDicts, Numbers, growing_collator, stack_dicts
from tests.loader.streams import WORKER_NAMES, WORKERS, content, descriptors, loading, stream
from tests.properties import slowly

IN_SLOTS = pytest.mark.parametrize("workers", WORKERS, ids=WORKER_NAMES)


def shared_ranges() -> list[tuple[int, int]]:
    """Where the memory of loaders' batches lies in this process."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "libai_data_batches" in line]
    return [tuple(int(edge, 16) for edge in line.split()[0].split("-")) for line in lines]  # type: ignore[misc]


def shared_megabytes(loader: BatchLoader) -> float:
    """Memory that a loader's batches really take (its file is as long as all that was ever allocated)."""
    return Path(f"/proc/self/fd/{loader._arena.descriptor}").stat().st_blocks * 512 / 1e6


def slots_of(loader: BatchLoader) -> int:
    return len(loader._slot_list.slots)


def in_use(loader: BatchLoader) -> int:
    return loader._slot_list.in_use()


@pytest.fixture()
def slot_list() -> SlotList:
    return SlotList(Arena(), planned=3)


DTYPES = st.sampled_from(["bool", "int8", "f2", "f4", "i8"])


@given(st.lists(st.tuples(DTYPES, st.lists(st.integers(0, 5), max_size=3))))
def test_arrays_of_a_slot_are_aligned_and_do_not_overlap(fields: list[tuple[str, list[int]]]) -> None:
    specs = lay_out((f"f{number}", np.dtype(dtype), shape) for number, (dtype, shape) in enumerate(fields))
    end = 0
    for spec in specs:
        assert spec.offset % 64 == 0
        assert spec.offset >= end
        end = spec.offset + spec.nbytes
    assert bytes_of(specs) == end
    memory = views(np.zeros(end, dtype=np.uint8), specs)
    for number, spec in enumerate(specs):
        memory[spec.name][...] = number % 2
    for number, (dtype, shape) in enumerate(fields):
        array = memory[f"f{number}"]
        assert array.shape == tuple(shape)
        assert array.dtype == np.dtype(dtype)
        assert (array == number % 2).all()


def test_a_slot_comes_back_with_the_last_of_its_views(slot_list: SlotList) -> None:
    specs = lay_out([("a", np.dtype("f4"), (4, 2)), ("empty", np.dtype("f4"), (4, 0))])
    slot = slot_list.acquire(bytes_of(specs))
    arrays: dict[str, Any] = slot_list.hand_out(slot, specs)
    piece, empty = arrays["a"][1:, 0].T, arrays["empty"]
    del arrays
    assert slot_list.acquire(64) is not slot
    del empty
    assert slot_list.acquire(64) is not slot
    del piece
    assert slot_list.acquire(64) is slot


@pytest.mark.parametrize("seed", range(4))
def test_no_slot_is_in_two_hands_although_batches_come_back_late(seed: int) -> None:
    chance = random.Random(seed)
    steps = chance.choices(["acquire", "hand out", "give back", "let go", "restart"], [4, 3, 1, 2, 1], k=300)
    slots, specs = SlotList(Arena()), lay_out([("a", np.dtype("u1"), (8,))])
    being_read: list[Slot] = []
    kept: list[tuple[Slot, Any]] = []
    hands: list[int] = []
    for step in steps:
        if step == "acquire":
            being_read.append(slots.acquire(8))
        elif step == "restart":  # The workers have ended, and their tasks with them.
            being_read.clear()
            slots.reclaim()
        elif step == "let go" and kept:
            kept.pop(chance.randrange(len(kept)))
        elif being_read:
            slot = being_read.pop(chance.randrange(len(being_read)))
            if step == "hand out":
                kept.append((slot, slots.hand_out(slot, specs)))
            else:
                slots.give_back(slot)
        hands = [slot.number for slot in (*being_read, *(slot for slot, _ in kept))]
        assert len(set(hands)) == len(hands), "one slot in two hands"
    assert slots.in_use() == len(hands)


def test_a_slot_that_is_too_small_moves_and_gives_its_memory_back(slot_list: SlotList) -> None:
    slot = slot_list.acquire(2**20)
    slot_list.arena.lease(slot.offset, slot.size)[...] = 1
    before = slot.offset
    slot_list.give_back(slot)
    assert slot_list.acquire(2**21) is slot
    assert slot.offset != before
    assert slot.size >= 2**21
    used = Path(f"/proc/self/fd/{slot_list.arena.descriptor}").stat().st_blocks * 512
    assert used < 2**20


def test_memory_stays_valid_after_the_arena_is_closed_which_takes_its_descriptor_with_it() -> None:
    arena = Arena()
    lease = arena.lease(*arena.allocate(100))
    lease[...] = 5
    arena.close()
    assert (lease == 5).all()
    before = descriptors()
    for _ in range(3):
        arena = Arena()
        arena.lease(*arena.allocate(100))
    del arena
    wait_until(lambda: descriptors() <= before, "end of what was opened")


def test_memory_that_a_limit_of_the_system_forbids_is_refused_with_the_limit() -> None:
    arena, private = Arena(), PrivateArena()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match=r"share cannot grow to 2097152 bytes.*`ulimit -f`.*worker_type='thread'"):
            arena.allocate(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(OSError, match=r"cannot map .* bytes: Cannot allocate memory .*`ulimit -v`"):
        private.lease(*private.allocate(1 << 50))


def test_threads_of_a_closed_loader_write_into_no_other_loaders_memory() -> None:
    """With a closed arena's number in its hands, a thread would map whatever has been opened since."""
    first = Arena()
    begun, closed = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        begun.set()
        closed.wait()
        try:
            first.lease(0, 4096)[...] = 1
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    begun.wait()
    first.close()
    second = Arena()
    memory = second.lease(*second.allocate(4096))
    closed.set()
    thread.join()
    assert errors
    assert not memory.any()


@IN_SLOTS
def test_a_batch_is_a_view_of_a_slot(workers: dict[str, Any]) -> None:
    with loading(Numbers(), **workers) as loader:
        batch = next(iter(loader))
        slot_list = loader._slot_list
        slots = [slot_list.arena.lease(slot.offset, slot.size) for slot in slot_list.slots]
        for data in batch.get_fields().values():
            assert any(np.shares_memory(data.tensor.numpy(), slot) for slot in slots)


def test_what_workers_collate_is_a_view_of_a_slot() -> None:
    with loading(Numbers(), collate_fn=stack_dicts, num_workers=1, start_method="fork") as loader:
        batch = next(iter(loader))
        for data in batch.get_fields().values():
            address = data.tensor.numpy().ctypes.data
            assert any(start <= address < end for start, end in shared_ranges())


@IN_SLOTS
def test_a_trainer_that_keeps_nothing_uses_the_planned_slots_alone(
    workers: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with loading(Numbers(), prefetch=2, **workers) as loader:
        for batch in islice(loader, 40):
            content(batch)
        assert slots_of(loader) <= 2 + 3
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


KEEPING = {
    "the tensors": lambda batch: [data.tensor for data in batch.get_fields().values()],
    "one tensor": lambda batch: batch.values.tensor,
    "an array of a tensor": lambda batch: batch.values.tensor.numpy(),
    "a slice of a tensor": lambda batch: batch.values.tensor[1:, 2],
    "a slice of an array": lambda batch: batch.values.tensor.numpy()[2:, 1:],
    "the batch": lambda batch: batch,
}


@pytest.mark.parametrize("keep", KEEPING.values(), ids=KEEPING.keys())
def test_a_slot_is_used_again_only_when_nothing_of_its_batch_is_kept(keep: Any) -> None:
    dataset = Numbers(400)
    with loading(dataset, num_workers=2, worker_type="thread", prefetch=1) as loader:
        iterator = iter(loader)
        kept = keep(next(iterator))
        before = content_of(kept)
        for _ in range(20):
            next(iterator)
        assert content_of(kept) == before
        used = in_use(loader)
        del kept
        wait_until(lambda: in_use(loader) == used - 1, "slot that is free again")


@pytest.mark.parametrize("options", [{}, {"on_error": "skip", "replacement_budget": 0}], ids=["raise", "over budget"])
def test_the_memory_of_a_batch_that_failed_is_used_again(options: dict[str, Any]) -> None:
    dataset = Failing(1200, bad=[1150])
    with loading(dataset, SingleRoundSampler(dataset, 100), **options) as loader:
        with pytest.raises(SampleError, match="no picture 1150"):
            deque(loader, maxlen=0)
        wait_until(lambda: in_use(loader) == 0, "slots that are free again")


def content_of(kept: Any) -> Any:
    if hasattr(kept, "get_fields"):
        return content(kept)
    if isinstance(kept, list):
        return [content_of(item) for item in kept]
    return np.asarray(kept if isinstance(kept, np.ndarray) else kept.numpy()).tobytes()


@IN_SLOTS
def test_kept_batches_stay_correct_and_the_growing_ring_is_reported_once(
    workers: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Numbers(400)
    with loading(dataset, prefetch=2, **workers) as loader:
        kept = list(islice(loader, 50))
        slots = slots_of(loader)
        assert slots >= 50
        reports = [record for record in caplog.records if "memory grows" in record.message]
        assert len(reports) == 1
        assert [content(batch) for batch in kept] == stream(dataset, batches=50)
        kept.clear()
        for batch in islice(loader, 50):
            content(batch)
        assert slots_of(loader) == slots


@pytest.mark.parametrize("workers", [WORKERS[0], WORKERS[2]])
def test_batches_outlive_their_loader(workers: dict[str, Any]) -> None:
    dataset = Numbers(400)
    with loading(dataset, **workers) as loader:
        kept = list(islice(loader, 5))
    del loader
    assert [content(batch) for batch in kept] == stream(dataset, batches=5)


def test_another_thread_may_hold_the_last_view() -> None:
    dataset = Numbers(400)
    received: deque[Any] = deque()
    go_on, has_let_go = threading.Event(), threading.Event()

    def hold() -> None:
        while True:
            go_on.wait()
            go_on.clear()
            if not received:
                return
            received.popleft()
            has_let_go.set()

    thread = threading.Thread(target=hold)
    thread.start()
    with loading(dataset, num_workers=2, worker_type="thread", prefetch=2) as loader:
        iterator = iter(loader)
        for _ in range(30):
            received.append(next(iterator))
            go_on.set()
            assert has_let_go.wait(stretched(30))
            has_let_go.clear()
        assert slots_of(loader) <= 2 + 3
    go_on.set()
    thread.join()


@pytest.mark.parametrize("prefetch", [1, 3, 8])
def test_prefetch_bounds_what_workers_read_ahead(prefetch: int) -> None:
    asked: list[int] = []
    four_more = threading.Condition()

    class Counting(Numbers):
        def __getitem__(self, index: int) -> Any:
            with four_more:
                asked.append(index)
                four_more.notify_all()
            return super().__getitem__(index)

    with loading(Counting(400), num_workers=2, worker_type="thread", prefetch=prefetch) as loader:
        iterator = iter(loader)
        for taken in range(1, 6):
            next(iterator)
            expected = 4 * (taken + prefetch) + 1  # The first sample is read twice.
            with four_more:
                assert four_more.wait_for(lambda: len(asked) >= expected, timeout=stretched(30))  # noqa: B023
            # All tasks that are out have been done, so nothing more can be read until another batch is asked for.
            assert len(asked) == expected
        assert slots_of(loader) <= prefetch + 3


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_slow_trainer_costs_no_memory(start_method: str) -> None:
    megabyte = np.zeros(2**20, dtype=np.uint8)
    with loading(Fields({"data": megabyte}, 1000), num_workers=2, start_method=start_method, prefetch=3) as loader:
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        # As if the trainer were busy: all that may be read ahead has been read, and its memory is the bound.
        while not loader._reader.is_done(loader._iteration._pending[-1]):  # type: ignore[union-attr]
            pass
        assert shared_megabytes(loader) < (3 + 3) * 4.3
        for _ in range(40):
            next(iterator)
        assert shared_megabytes(loader) < (3 + 3) * 4.3


@pytest.mark.slow
def test_thousands_of_kept_batches_need_no_descriptors() -> None:
    script = """
import resource, sys
from itertools import islice
from tests.loader.sample_datasets import Numbers
from tests.loader.streams import loading, content, stream
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
for workers in ({"num_workers": 0}, {"num_workers": 2, "start_method": "fork"}):
    with loading(Numbers(5000), **workers) as loader:
        kept = list(islice(loader, 800))
        assert [int(batch.index.tensor[0]) for batch in kept] == [4 * k % 5000 for k in range(800)]
"""
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = run_to_end([sys.executable, "-c", script], env=path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("workers", [WORKERS[2], slowly(WORKERS[3])], ids=WORKER_NAMES[2:])
def test_batches_that_grow_get_more_room(workers: dict[str, Any]) -> None:
    dataset = NumberDicts(400)
    found = stream(dataset, batches=90, collate_fn=growing_collator, **workers)
    assert found == stream(dataset, batches=90, collate_fn=growing_collator)


def test_batches_of_changing_size_do_not_let_the_slots_grow_without_end() -> None:
    with loading(NumberDicts(40), collate_fn=growing_collator, num_workers=2, start_method="fork") as loader:
        for _ in islice(loader, 300):
            pass
        largest = 4 * 3700 * 8 + 4 * 8 + 64
        assert max(slot.size for slot in loader._slot_list.slots) < 4 * largest


def test_a_trainer_that_runs_ahead_of_oneflow_does_not_make_the_memory_grow(caplog: pytest.LogCaptureFixture) -> None:
    weights = flow.randn(1500, 1500)
    dataset = [{"x": np.full(1500, number, np.float32)} for number in range(40)]
    loader = from_iterable(dataset, 8, num_workers=1, worker_type="thread", ends="cycle")
    with caplog.at_level("WARNING"):
        for batch in islice(loader, 30):
            result = batch.x.tensor
            for _ in range(6):
                result = result.matmul(weights) * 0
    assert len(loader._slot_list.slots) <= loader._slot_list.planned
    assert "batches are in use" not in caplog.text
    loader.close()
