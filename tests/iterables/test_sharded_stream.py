"""Streams in shards, read by processes or threads, and shuffled: the rows depend on the shards, not on who reads."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data import DataLoader, get_worker_info
from libai_data.data.random.global_generators import warn_once
from libai_data.errors import CheckpointError, ConfigError, PassError, SampleError
from libai_data.iterables import from_iterable, prefetcher, sharded_stream, shuffle_buffer
from libai_data.iterables.interleaved import ShardPlace, open_at
from libai_data.iterables.iterable_source import Source
from libai_data.iterables.shard_lanes import ShardLanes
from libai_data.launch.same_interpreter import has_random_hashes
from libai_data.loader.same_dataset import are_same
from tests.deadline import stretched, wait_until
from tests.iterables.rows import (
    Rewinding,
    Scaled,
    Stateful,
    ViewsAndLocals,
    dealt,
    fails,
    of_a_set,
    sample,
    tells_its_process,
    unequal,
)
from tests.loader.streams import loader_threads
from tests.properties import examples, slowly

torch: Any = pytest.importorskip("torch")

READERS: list[Any] = [
    {"num_workers": 0},
    {"num_workers": 1},
    slowly({"num_workers": 2}),
    {"num_workers": 3, "worker_type": "thread"},
]
NAMES = ["in turn", "one process", "two processes", "threads"]


def rows(loader: Any, batches: int | None = None) -> list[int]:
    return [row for batch in islice(iter(loader.numpy()), batches) for row in batch["y"].tolist()]


@pytest.mark.parametrize("readers", READERS, ids=NAMES)
def test_whoever_reads_the_shards_they_take_turns_row_by_row(readers: dict[str, Any]) -> None:
    loader = from_iterable(dealt, 4, num_shards=3, **readers)
    for epoch in range(2):
        shards = [[item["y"] for item in dealt(epoch, shard, 3)] for shard in range(3)]
        expected = [shard[row] for row in range(14) for shard in shards if row < len(shard)]
        assert rows(loader) == expected
        assert sorted(expected) == list(range(41))


@pytest.mark.parametrize("readers", READERS, ids=NAMES)
def test_a_shard_that_ends_is_left_out_of_the_turns(readers: dict[str, Any]) -> None:
    loader = from_iterable(unequal, 2, num_shards=4, **readers)
    expected = [100 * shard + row for row in range(9) for shard in range(4) if row < 3 * shard]
    assert rows(loader) == expected


@settings(max_examples=examples(12))
@given(
    shards=st.integers(1, 5),
    buffer=st.integers(0, 60),
    cut=st.integers(0, 30),
    before=st.sampled_from(READERS[::3]),
    after=st.sampled_from(READERS[::3]),
)
def test_every_cut_continues_exactly_whoever_reads(
    shards: int, buffer: int, cut: int, before: dict[str, Any], after: dict[str, Any]
) -> None:
    how: dict[str, Any] = {"num_shards": shards, "shuffle_buffer": buffer, "seed": 3, "ends": "cycle"}
    stopped = from_iterable(dealt, 3, **how, **before)
    taken = rows(stopped, cut)
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = from_iterable(dealt, 3, **how, **after)
    resumed.load_state_dict(state)
    whole = from_iterable(dealt, 3, **how)
    assert taken + rows(resumed, 9) == rows(whole, cut + 9)


@settings(max_examples=examples(25))
@given(
    shards=st.one_of(st.none(), st.integers(1, 4)),
    buffer=st.integers(0, 20),
    size=st.integers(1, 30),
    cut=st.integers(1, 40),
    ends=st.sampled_from(["cycle", "short"]),
)
def test_every_cut_continues_exactly_from_the_states_of_the_shards(
    shards: int | None, buffer: int, size: int, cut: int, ends: str
) -> None:
    how: dict[str, Any] = {"num_shards": shards, "shuffle_buffer": buffer, "seed": 3, "ends": ends}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_stream, "_MOST_AT_ONCE", 3)
        patch.setattr(shuffle_buffer, "_DRAWN_AT_ONCE", 4)
        whole, stopped, resumed = (from_iterable(Stateful(size), 2, **how) for _ in range(3))
        # A pass over "short" ends by itself; one that was cut at its last batch continues with the next pass.
        more, passes = (None, 2) if ends == "short" else (cut + 9, 1)
        expected = [row for _ in range(passes) for row in rows(whole, more)]
        taken = rows(stopped, cut)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        taken += [row for _ in range(passes) for row in rows(resumed, more)]
        assert len(expected) <= len(taken)
        assert taken[: len(expected)] == expected


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [
        ({"num_workers": 2}, {"num_workers": 1}, {"num_shards": 3}),
        ({}, {"num_workers": 1}, {"shuffle_buffer": 20}),
        slowly({}, {"num_workers": 2}, {"num_shards": 3, "shuffle_buffer": 20}),
        slowly({"num_workers": 1}, {}, {}),
    ],
)
def test_a_resume_reads_no_row_before_the_states_of_the_shards(
    before: dict[str, Any], after: dict[str, Any], how: dict[str, Any]
) -> None:
    shards = how.get("num_shards", 1)
    stopped = from_iterable(Stateful(900), 10 * shards, **how, **before)
    rows(stopped, 80)
    state = stopped.state_dict()
    expected = rows(from_iterable(Stateful(900), 10 * shards, **how))[800 * shards :]
    resumed = from_iterable(Stateful(900, first_allowed=200), 10 * shards, **how, **after)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert rows(resumed) == expected
    assert len(json.dumps(state)) < 600


@pytest.mark.parametrize("text", ["x", "[]", "{}", '{"__shards__": [[]]}', '{"__shards__": 3}', "null"])
@pytest.mark.parametrize("how", [{"num_shards": 2}, {"shuffle_buffer": 4}, {"num_shards": 2, "shuffle_buffer": 4}])
def test_a_damaged_state_of_the_shards_is_an_error(how: dict[str, Any], text: str) -> None:
    loader = from_iterable(Stateful(900), 10, **how)
    rows(loader, 80)
    state = loader.state_dict()
    state["iterable"]["source"]["state"] = text
    loader.load_state_dict(state)
    with pytest.raises(SampleError, match=r"CheckpointError .*saved state") as error:
        rows(loader)
    assert isinstance(error.value.__cause__, CheckpointError)


def test_a_shard_that_ends_before_the_row_to_resume_at_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"shard 2 of unequal .*: it ended 1 rows before row 7 of epoch 3"):
        open_at(Source(unequal), 3, 2, 4, ShardPlace(taken=7))


def test_a_shuffle_buffer_holds_the_rows_that_follow_from_the_number_of_draws() -> None:
    for size, drawn in ((1, 5), (7, 0), (7, 3), (50, 1000)):
        buffer = shuffle_buffer.ShuffleBuffer(iter(()), None, size, 9, None)
        kept = list(range(size))
        for draw, slot in enumerate(buffer._slots(0, drawn).tolist()):
            kept[slot] = draw + size
        assert buffer._numbers_at(drawn).tolist() == kept


def test_the_draws_of_a_shuffle_buffer_stay_the_same_in_all_versions() -> None:
    # Whoever changes this answer refuses older states: they would continue with other rows.
    rows = shuffle_buffer.ShuffleBuffer(iter(range(20)), None, 5, 9, None).rows()
    assert list(islice(rows, 15)) == [3, 5, 1, 6, 4, 7, 0, 8, 11, 2, 12, 14, 16, 10, 17]


def test_epochs_follow_a_resume_at_which_the_shuffle_buffer_holds_the_rest_of_the_epoch() -> None:
    saved, again = (from_iterable(Rewinding(range(1, 7)), 2, shuffle_buffer=5) for _ in range(2))
    begun = rows(saved, 1)
    again.load_state_dict(saved.state_dict())
    saved.close()
    assert sorted(begun + rows(again)) == sorted(rows(again)) == [1, 2, 3, 4, 5, 6]


def test_a_shuffle_buffer_draws_another_order_each_epoch_and_moves_no_row_far_forward() -> None:
    loader = from_iterable([sample(number) for number in range(5)], 1, shuffle=True)
    with pytest.raises(ConfigError, match="shuffle_buffer=8 is for streams"):
        from_iterable([sample(0)], 1, shuffle_buffer=8)
    loader = from_iterable(lambda: (sample(number) for number in range(200)), 7, shuffle_buffer=20, seed=1)
    first, second = rows(loader), rows(loader)
    assert sorted(first) == sorted(second) == list(range(200))
    assert first != second != list(range(200))
    assert all(row < place + 20 for place, row in enumerate(first))
    again = from_iterable(lambda: (sample(number) for number in range(200)), 7, shuffle_buffer=20, seed=2)
    assert rows(again) != first


class Asks(torch.utils.data.IterableDataset):
    """Splits itself by what PyTorch's `get_worker_info` answers."""

    def __init__(self, size: int = 30) -> None:
        self.start, self.stop = 0, size

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(self.start + first, self.stop, step):
            yield {"x": torch.full((2,), number), "y": number}


class Told(Asks):
    """Yields what `tell` has told its copy, as in PyTorch's documentation."""

    def __iter__(self) -> Iterator[Any]:
        return iter([{"y": number} for number in range(self.start, self.stop)])


def tell(number: int) -> None:
    info = torch.utils.data.get_worker_info()
    own = get_worker_info()
    assert own is not None and own.id == info.id == number and own.dataset is info.dataset
    share = info.dataset.stop // info.num_workers
    info.dataset.start, info.dataset.stop = number * share, (number + 1) * share


class AsksUs:
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        return iter([{"y": number} for number in range(info.id, 30, info.num_workers)])


@pytest.mark.parametrize("num_workers", [0, slowly(2)])
def test_iterables_that_ask_which_worker_they_are_in_yield_their_shards(num_workers: int) -> None:
    theirs = torch.utils.data.DataLoader(Asks(), batch_size=None, num_workers=3)
    expected = [int(item["y"]) for item in theirs]
    for dataset, init in ((Asks(), None), (AsksUs(), None)):
        loader = DataLoader(dataset, 4, num_shards=3, num_workers=num_workers, worker_init_fn=init)
        assert rows(loader) == rows(loader) == expected
        loader.close()
    loader = DataLoader(Told(), 4, num_shards=3, num_workers=num_workers, worker_init_fn=tell)
    assert rows(loader) == [share * 10 + row for row in range(10) for share in range(3)]
    loader.close()
    assert torch.utils.data.get_worker_info() is None and get_worker_info() is None


class AsksForEachRow(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        for number in range(80):
            before = torch.utils.data.get_worker_info()
            time.sleep(0.001)
            info = torch.utils.data.get_worker_info()
            assert info is before
            yield {"y": 1000 * info.num_workers + 100 * info.id + number}


def test_loaders_that_read_at_the_same_time_hear_each_its_own_shard() -> None:
    loaders = [DataLoader(AsksForEachRow(), 4, num_shards=shards) for shards in (2, 3, 4)]
    for _ in range(2):
        found = zip_longest(*(iter(loader.numpy()) for loader in loaders))
        streams = [[row for batch in batches if batch for row in batch["y"].tolist()] for batches in zip(*found)]
        for shards, stream in zip((2, 3, 4), streams):
            assert stream == [1000 * shards + 100 * shard + row for row in range(80) for shard in range(shards)]
    for loader in loaders:
        loader.close()
    assert torch.utils.data.get_worker_info() is None and get_worker_info() is None


def test_an_iterable_that_does_not_split_itself_is_refused() -> None:
    for size in (30, 5):
        loader = DataLoader(Told(size), 4, num_shards=2)
        with pytest.raises(
            SampleError, match=rf"begin with the same {min(size, 8)} sample\(s\), so it does not split its samples"
        ):
            rows(loader)

    def equal(shard: int, num_shards: int) -> Iterator[Any]:
        return ({"y": number} for number in range(9))

    assert rows(from_iterable(equal, 6, num_shards=2)) == [number for number in range(9) for _ in range(2)]


def test_more_workers_than_shards_are_told_to_say_num_shards(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Asks(), 4, num_workers=5)
    assert rows(loader) == list(range(30))
    assert "only 1 of num_workers=5" in caplog.text and "num_shards=5 or more" in caplog.text


def test_a_process_that_is_killed_is_replaced_and_no_row_lost_or_repeated(tmp_path: Path) -> None:
    def source(shard: int, num_shards: int) -> Iterator[Any]:
        return tells_its_process(str(tmp_path), shard, num_shards)

    loader = from_iterable(source, 5, num_shards=2, num_workers=2)
    batches = iter(loader.numpy())
    found = next(batches)["y"].tolist()
    os.kill(int((tmp_path / "1").read_text()), signal.SIGKILL)
    found += [row for batch in batches for row in batch["y"].tolist()]
    assert found == list(range(400))


@pytest.mark.parametrize("readers", READERS, ids=NAMES)
def test_a_shard_that_raises_ends_the_run_with_its_traceback(readers: dict[str, Any]) -> None:
    loader = from_iterable(fails, 1, num_shards=2, **readers)
    with pytest.raises(SampleError, match=r"(?s)fails raised .*the disk is gone"):
        rows(loader)
    del loader
    await_end_of_lanes()


def await_end_of_lanes() -> None:
    gc.collect()
    for thread in threading.enumerate():
        if ", lane " in thread.name:
            thread.join(stretched(60))
            assert not thread.is_alive()


def test_those_that_read_end_with_the_loader() -> None:
    def source(shard: int, num_shards: int) -> Iterator[Any]:
        while True:
            yield {"y": os.getpid()}

    loader = from_iterable(source, 4, num_shards=2, num_workers=2, ends="cycle")
    processes = set(next(iter(loader.numpy()))["y"].tolist())
    assert len(processes) == 2
    del loader
    gc.collect()
    assert not any(Path(f"/proc/{process}").exists() for process in processes)
    await_end_of_lanes()


def test_a_state_of_other_shards_or_another_buffer_is_refused() -> None:
    def loader(**how: Any) -> Any:
        return from_iterable(dealt, 4, ends="drop", **how)

    saved = loader(num_shards=2, shuffle_buffer=5, seed=1)
    rows(saved, 2)
    state = saved.state_dict()
    for other in ({"num_shards": 3, "shuffle_buffer": 5, "seed": 1}, {"num_shards": 2}, {}):
        with pytest.raises(CheckpointError, match=r"saved with {'num_shards': 2, 'shuffle_buffer': 5, 'seed': 1}"):
            loader(**other).load_state_dict(state)
    changed = loader(num_shards=3)
    changed.load_state_dict(state, override=["seed"])
    assert len(rows(changed)) == 32


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (dealt, {"num_workers": 2}, "has the parameters shard and num_shards: set num_shards"),
        (dealt, {"shuffle_buffer": 3}, "set num_shards, the number"),
        (
            Asks(),
            {"num_workers": 2, "num_shards": 2, "worker_type": "thread"},
            "the same answer to all threads of a process",
        ),
        (Asks(), {"num_shards": 0}, "num_shards is 0"),
        (Asks(), {"shuffle_buffer": -1}, "shuffle_buffer is -1"),
        (Asks(), {"num_workers": 1, "worker_type": "fibre"}, "worker_type is 'fibre'"),
        ([sample(0)], {"num_shards": 2}, "num_shards=2 is for streams"),
        (torch.utils.data.DataLoader(Asks(), 2), {"shuffle_buffer": 2}, "yields batches; shuffle its samples"),
        ((sample(0) for _ in range(2)), {"num_workers": 1}, "cannot be sent to the workers that read its shards"),
    ],
)
def test_what_makes_no_sense_is_refused(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_iterable(source, 2, **options)


@pytest.mark.parametrize("num_workers", [1, slowly(3)])
def test_batches_are_read_by_processes_too(num_workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    theirs = torch.utils.data.DataLoader(Asks(), 7)
    loader = from_iterable(theirs, 4, num_workers=num_workers)
    assert rows(loader) == rows(loader) == list(range(30))
    loader.close()
    # In each epoch it draws a seed for its workers, and nothing else.
    assert "draws from torch" not in capfd.readouterr().err


class DrawsWhenLoaded(Asks):
    """As if its module imported OneFlow, which draws from Python's generator."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        random.random()
        self.__dict__.update(state)


def test_what_draws_while_a_process_loads_the_iterable_is_no_draw_of_the_iterable(
    capfd: pytest.CaptureFixture[str],
) -> None:
    loader = from_iterable(DrawsWhenLoaded(), 4, num_workers=1)
    assert rows(loader) == list(range(30))
    loader.close()
    assert "which the whole program shares" not in capfd.readouterr().err


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "worker_type": "thread"}])
def test_an_iterable_that_changes_between_epochs_yields_what_it_yields_then(workers: dict[str, Any]) -> None:
    scaled = Scaled()
    loader = from_iterable(scaled, 4, num_shards=1, **workers)
    assert [batch["x"].tolist() for batch in loader.numpy()] == [[0, 1, 2, 3]]
    scaled.factor = 10
    assert [batch["x"].tolist() for batch in loader.numpy()] == [[0, 10, 20, 30]]


@pytest.mark.parametrize("option", [{"worker_init_fn": print}, {"worker_type": "thread"}], ids=str)
def test_options_of_workers_have_no_effect_on_a_stream_without_workers(option: dict[str, Any]) -> None:
    assert rows(DataLoader(Asks(), 4, num_workers=0, **option)) == list(range(30))


@pytest.mark.parametrize("num_workers", [slowly(0), 1, slowly(2)])
def test_the_processes_that_read_a_stream_may_be_asked_to_be_spawned(num_workers: int) -> None:
    loader = DataLoader(Asks(), 4, num_shards=2, num_workers=num_workers, multiprocessing_context="spawn")
    assert sorted(rows(loader)) == list(range(30))


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_an_unusual_exception_in_a_process_that_reads_is_named(error: BaseException) -> None:
    def rows(shard: int, num_shards: int) -> Iterator[dict[str, int]]:
        yield {"x": 1}
        raise error

    loader = from_iterable(rows, 2, num_shards=1, num_workers=1)
    with pytest.raises(SampleError, match=type(error).__name__):
        list(loader.numpy())


def test_rows_of_classes_of_functions_and_views_come_from_processes_as_they_are() -> None:
    rows = ViewsAndLocals()
    loader = from_iterable(rows, 1, num_workers=1, num_shards=2)
    batches = list(loader.numpy())
    loader.close()
    assert [batch["x"].tolist() for batch in batches] == [[0.5], [1.5], [2.5], [3.5]]
    assert [batch["y"].tolist() for batch in batches] == [[[0.5, 1.5, 2.5, 3.5][index:]] for index in range(4)]
    assert [type(batch["pair"]) for batch in batches] == [rows.pair] * 4


def test_the_processes_that_read_a_stream_order_sets_alike(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    warn_once.cache_clear()
    loader = from_iterable(of_a_set, 4, num_shards=3, num_workers=3)
    assert sorted(number for batch in loader.numpy() for number in batch["y"].tolist()) == list(range(100))
    assert ("of_a_set may use hashes of texts (of_a_set())" in caplog.text) == has_random_hashes()


class StallingOnce:
    """Stands for the comparison of two shards, in threads, of a loader of numbers; the first one waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stalls, self.goes_on, self.has_gone_on = threading.Event(), threading.Event(), threading.Event()
        monkeypatch.setattr(sharded_stream, "are_same", self)
        self.threads = ThreadPoolExecutor(1)

    def __call__(self, *attributes: Any) -> bool:
        if not self.stalls.is_set():
            self.stalls.set()
            assert self.goes_on.wait(60)
            self.has_gone_on.set()
        return are_same(*attributes)

    def loader(self, size: int, rows: int, **options: Any) -> Any:
        def numbers(shard: int, num_shards: int) -> Iterator[Any]:
            return ({"n": number} for number in range(shard, size, num_shards))

        return from_iterable(numbers, rows, num_shards=2, num_workers=2, worker_type="thread", **options)

    def go_on_when_closed(self, loader: Any) -> None:
        """Let the comparison go on as soon as another thread has begun to close the loader."""
        closed = loader._stream._closed

        def go_on() -> None:
            wait_until(lambda: closed.is_set, "end of the pass")
            self.goes_on.set()

        threading.Thread(target=go_on).start()

    def first_pass(self, loader: Any) -> Future[Any]:
        """A pass in another thread, which has begun to wait."""
        first = self.threads.submit(lambda: next(iter(loader)))
        assert self.stalls.wait(60)
        return first


def test_close_ends_the_threads_of_shards_that_are_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison, before = StallingOnce(monkeypatch), loader_threads()
    loader = comparison.loader(9, 2)
    first = comparison.first_pass(loader)
    comparison.go_on_when_closed(loader)
    loader.close()
    with pytest.raises(PassError):
        first.result(60)
    wait_until(lambda: loader_threads() <= before, "end of the threads")


def test_an_epoch_that_begins_while_another_thread_ends_its_lanes_ends_too() -> None:
    lanes = ShardLanes(None, lambda part: ([], True, None), 2, "rows")

    class Places(list[ShardPlace]):
        def __iter__(self) -> Iterator[ShardPlace]:
            lanes.close()
            return super().__iter__()

    parts = lanes.begin(lambda shard, place: None, Places([ShardPlace()] * 2))
    with ThreadPoolExecutor(1) as threads, pytest.raises(PassError, match="another pass"):
        threads.submit(list, parts[0]).result(timeout=60)


def test_a_pass_that_is_opened_late_does_not_end_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = StallingOnce(monkeypatch)
    monkeypatch.setattr(prefetcher, "_END_SECONDS", 0.01)
    loader = comparison.loader(2000, 20, prefetch=1)
    first = comparison.first_pass(loader)
    loader.close()
    with pytest.raises(PassError):
        first.result(60)
    threading.Timer(0.05, comparison.goes_on.set).start()
    batches = iter(loader.numpy())
    found = next(batches)["n"].tolist()
    assert comparison.has_gone_on.wait(60)
    found += [number for batch in batches for number in batch["n"].tolist()]
    assert found == list(range(2000))
