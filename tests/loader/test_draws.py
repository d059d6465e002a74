"""What a dataset draws belongs to the sample, from whichever generator, and the training loop does not notice."""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from libai_data import DataLoader
from libai_data.data.datasets import (
    BlendedDataset,
    ConcatDataset,
    FilteredDataset,
    Map,
    OneRound,
    PackedDataset,
    RandomMap,
    Subset,
    random_split,
)
from libai_data.data.random import global_generators
from libai_data.data.random.hashing import combine64
from libai_data.data.random.kept_objects import own_generators
from libai_data.data.random.sample_random import reading_samples, sample_generator
from libai_data.data.samplers import CyclicSampler
from libai_data.data.transforms import BatchTransform, Seeded
from libai_data.errors import SampleError
from libai_data.loader import threaded_reader
from libai_data.loader import threads as loader_threads
from libai_data.loader.default_collate import default_collate
from libai_data.structures import fields_of
from tests.deadline import run_to_end
from tests.loader.drawing_datasets import (
    SOURCES,
    AsksForOne,
    Draws,
    DrawsFilled,
    DrawsItems,
    FailsSometimes,
    HandsOutGenerators,
    ReadsByALoader,
    ReadsByThreads,
    Seeds,
    Wrapped,
    draw,
    drawing_collator,
    with_noise,
)
from tests.loader.sample_datasets import OfAnyForm
from tests.loader.streams import WORKER_NAMES, WORKERS, content, loading
from tests.properties import examples, is_long_run, slowly

with_workers = settings(suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.reuse, Phase.generate])


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    """Each test is told what is told once."""
    global_generators.warn_once.cache_clear()
    yield


def samples(
    dataset: Any, batch: int = 4, epochs: int = 1, field: str = "drawn", **arguments: Any
) -> dict[tuple[int, int], bytes]:
    """What was drawn for each (epoch, index)."""
    count = epochs * len(dataset) // batch
    found: dict[tuple[int, int], bytes] = {}
    with loading(dataset, CyclicSampler(dataset, batch), **arguments) as loader:
        for number, read in enumerate(islice(iter(loader), count)):
            fields = read.get_fields()
            for row in range(batch):
                place = divmod(number * batch + row, len(dataset))
                assert int(fields["index"].tensor.numpy()[row]) == place[1]
                found[place] = fields[field].tensor.numpy()[row].tobytes()
    return found


def states() -> list[Any]:
    """The states of all global generators whose state can be known."""
    import torch

    return [random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()]


@pytest.mark.watchdog(180)
@pytest.mark.parametrize("kind", [Draws, slowly(DrawsItems), slowly(DrawsFilled)])
def test_what_a_dataset_draws_depends_on_seed_epoch_and_index_alone(kind: Any) -> None:
    dataset = kind(["python", "numpy", "normal", "torch"])
    expected = samples(dataset, epochs=2)
    assert len(set(expected.values())) == 48, "each sample is drawn anew in each epoch"
    # Spawned workers import PyTorch.
    for workers in WORKERS if is_long_run() else WORKERS[:3]:
        assert samples(dataset, epochs=2, batch=6, **workers) == expected, workers
    other = samples(dataset, epochs=2, seed=1)
    assert not set(other.values()) & set(expected.values())


@pytest.mark.slow
@pytest.mark.watchdog(180)
def test_draws_from_oneflow_depend_on_seed_epoch_and_index_alone(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Draws(SOURCES)
    expected = samples(dataset)
    assert "Draws draws from OneFlow's generator" in caplog.text
    assert samples(dataset, batch=6) == samples(dataset, num_workers=2, start_method="spawn") == expected
    drawn = np.array([np.frombuffer(row) for row in expected.values()])
    assert len(np.unique(np.round(drawn[:, 1:], 5))) == 4 * 24, "no two generators draw the same"


CHANGING: dict[str, Any] = {
    "a generator of its own": partial(np.random.default_rng(0).random),
    "a fresh generator": lambda: np.random.default_rng().random(),
    "a counter": itertools.count().__next__,
    "the clock": time.perf_counter,
}


@pytest.mark.parametrize("function", CHANGING.values(), ids=CHANGING.keys())
def test_a_sample_that_differs_each_time_it_is_read_is_told_once(
    function: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with loading(OfAnyForm(lambda _: {"x": np.float64(function())}), num_workers=1, worker_type="thread") as loader:
        list(islice(iter(loader), 5))
        assert loader.stats()["samples"] == 20, "what is read to compare does not count"
    told = [record.getMessage() for record in caplog.records if "returns a different" in record.getMessage()]
    assert [text.split(". ")[0] for text in told] == [
        "OfAnyForm returns a different 'x' each time that sample 0 is read"
    ]


@pytest.mark.parametrize("function", [random.random, np.random.normal, lambda: np.nan], ids=["random", "numpy", "nan"])
def test_a_sample_that_is_the_same_each_time_it_is_read_is_not_told_of(
    function: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with loading(OfAnyForm(lambda _: {"x": np.float64(function())}), num_workers=2, worker_type="thread") as loader:
        list(islice(iter(loader), 5))
    assert "returns a different" not in caplog.text


WITHOUT_A_SEED: dict[str, Any] = {
    "numpy": lambda: np.random.default_rng().random(),
    "numpy's old generator": lambda: np.random.RandomState().random(),
    "numpy's global generator": lambda: np.random.seed() or np.random.random(),
    "python": lambda: random.Random().random(),
    "python's global generator": lambda: random.seed() or random.random(),
}


@pytest.mark.parametrize(
    "how", [{}, {"collate_fn": default_collate}, slowly({"num_workers": 2})], ids=["plain", "collator", "workers"]
)
@pytest.mark.parametrize("kind", WITHOUT_A_SEED)
def test_samples_after_the_first_that_draw_from_generators_without_a_seed_are_told_once(
    kind: str, how: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    draw = WITHOUT_A_SEED[kind]
    dataset = OfAnyForm(lambda index: {"x": np.float64(draw() if index else 0)})
    with loading(dataset, **how) as loader:
        list(islice(iter(loader), 12))
        # What is read to compare does not count. Workers read ahead.
        assert "num_workers" in how or "global" in kind or loader.stats()["samples"] == 48
    [text] = [record.getMessage() for record in caplog.records if "returns a different" in record.getMessage()]
    assert re.match("OfAnyForm returns a different 'x' each time that sample [1-7] is read", text)


def test_seeds_that_change_no_sample_are_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def sample(index: int) -> dict[str, Any]:
        return {"x": np.float64(len(uuid.uuid4().hex)), "y": sample_generator().random()}

    with loading(OfAnyForm(sample)) as loader:
        list(islice(iter(loader), 5))
    assert "returns a different" not in caplog.text


@settings(with_workers, max_examples=examples(40))
@given(
    sources=st.lists(st.sampled_from(SOURCES[:4]), min_size=1, max_size=3, unique=True),
    kind=st.sampled_from([Draws, DrawsItems, DrawsFilled]),
    every=st.integers(1, 9),
    first=st.integers(0, 8),
    batch=st.sampled_from([1, 2, 3, 4, 6, 12]),
    workers=st.fixed_dictionaries(
        {"num_workers": st.integers(0, 3), "worker_type": st.just("thread"), "prefetch": st.integers(1, 5)}
    ),
    kept=st.booleans(),
)
def test_samples_that_draw_now_and_then_draw_their_own_and_leave_the_generators_as_they_were(
    sources: list[str], kind: Any, every: int, first: int, batch: int, workers: dict[str, Any], kept: bool
) -> None:
    dataset = kind(sources, every=every, first=first % every)
    reference: dict[tuple[int, int], bytes] = {}
    for index in range(24):
        with reading_samples(((0, 0, index),)), global_generators.seeded(combine64(0, 0, index)):
            reference[0, index] = dataset[index]["drawn"].tobytes()
    random.gauss(0, 1), np.random.normal()
    if not kept:
        random.gauss(0, 1), np.random.normal()
    before = states()
    assert samples(dataset, batch, **workers) == reference
    if not workers["num_workers"]:
        assert states() == before


@pytest.mark.parametrize("draw_one", [random.random, np.random.random], ids=["python", "numpy"])
def test_the_draws_of_another_thread_are_not_undone_while_samples_are_read(draw_one: Any) -> None:
    """The other thread draws while some samples are read, as a training loop while a stream reads by its own loader."""
    random.seed(5), np.random.seed(5)
    expected = [draw_one() for _ in range(200)]
    random.seed(5), np.random.seed(5)
    drawn: list[float] = []
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)

    def draws() -> None:
        while asked.acquire() and not is_over:
            drawn.append(draw_one())
            answered.release()

    def sample(index: int) -> Any:
        if next(calls) % 10 == 0:
            asked.release()
            assert answered.acquire(timeout=60)
        return {"x": index}

    calls = itertools.count()
    is_over: list[bool] = []
    thread = threading.Thread(target=draws)
    thread.start()
    try:
        with loading(OfAnyForm(sample)) as loader:
            for _ in islice(iter(loader), 200):
                pass
    finally:
        is_over.append(True)
        asked.release()
        thread.join()
    assert len(drawn) > 80 and drawn == expected[: len(drawn)]


@pytest.mark.parametrize("first", range(4, 21, 4))
def test_a_dataset_that_draws_later_is_found_after_another_thread_has_drawn(first: int) -> None:
    def read(others: list[int]) -> dict[tuple[int, int], bytes]:
        def sample(index: int) -> Any:
            if index in others:
                others.remove(index)
                with ThreadPoolExecutor(1) as threads:
                    threads.submit(random.random).result()
            return {"index": index, "drawn": random.random() if index >= first else 0.0}

        return samples(OfAnyForm(sample, 24))

    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    try:
        assert read([1]) == read([])
    finally:
        ends.set()
        thread.join()


@pytest.mark.parametrize("good", [0, 5])
def test_a_sample_that_fails_is_not_read_again_and_again_because_another_thread_draws(good: int) -> None:
    """It may have waited for a store that does not answer."""
    readings: list[int] = []

    def sample(index: int) -> Any:
        readings.append(index)
        others.submit(random.random).result()
        if index == good:
            raise OSError("no answer")
        return {"x": index}

    error = pytest.raises(SampleError, match="no answer")
    with ThreadPoolExecutor(1) as others, error, loading(OfAnyForm(sample)) as loader:
        for _ in islice(iter(loader), 8):
            pass
    assert readings.count(good) <= 1 + (good > 0)


def test_draws_by_calls_that_cannot_be_noticed_are_found_beside_other_threads() -> None:
    dataset = OfAnyForm(lambda index: {"index": index, "drawn": np.array([*map(np.random.uniform, [0.0], [1.0])])})
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    try:
        before = states()
        drawn = samples(dataset)
        assert states() == before and samples(dataset, batch=2) == drawn and len(set(drawn.values())) == 8
    finally:
        ends.set()
        thread.join()


@given(st.lists(st.sampled_from(["read", "draw", "seed", "normal"]), min_size=1, max_size=12))
def test_a_training_loop_draws_as_if_nothing_were_read(steps: list[str]) -> None:
    import torch

    def loop(reads: bool) -> list[float]:
        random.seed(3), np.random.seed(3), torch.manual_seed(3)
        found: list[float] = []
        dataset = Draws(["python", "normal", "torch"])
        with loading(dataset) as loader:
            batches = iter(loader)
            for number, step in enumerate(steps):
                if step == "read" and reads:
                    next(batches)
                elif step == "draw":
                    found += [draw(source) for source in SOURCES[:4]]
                elif step == "normal":
                    found += [float(np.random.normal()), random.gauss(0, 1)]
                elif step == "seed":
                    random.seed(number), np.random.seed(number)
        return found

    assert loop(True) == loop(False)


def test_generators_are_put_back_when_a_sample_fails() -> None:
    before = states()
    with pytest.raises(SampleError), loading(FailsSometimes(["torch"])) as loader:
        list(islice(iter(loader), 50))
    assert states() == before


@pytest.mark.watchdog(120)
def test_a_dataset_that_seeds_by_itself_gets_what_it_seeds() -> None:
    expected = {(0, index): Seeds(())[index]["drawn"].tobytes() for index in range(24)}
    before = states()
    assert samples(Seeds(())) == samples(Seeds(()), num_workers=2, worker_type="thread") == expected
    samples(Seeds(()))
    assert states()[:2] != before[:2] or states() == before


@pytest.mark.watchdog(120)
def test_samples_that_fail_by_what_they_draw_are_replaced_alike_whoever_reads() -> None:
    dataset = FailsSometimes(["numpy"])

    def read(**arguments: Any) -> list[Any]:
        with loading(dataset, on_error="skip", **arguments) as loader:
            return [content(batch) for batch in islice(iter(loader), 6)]

    expected = read()
    assert len({fields["index"][2] for _, fields in expected}) == 6
    for workers in WORKERS[1:3]:
        assert read(**workers) == expected


@pytest.mark.parametrize("workers", WORKERS[:3], ids=WORKER_NAMES[:3])
def test_a_resumed_loader_draws_what_the_uncut_one_draws(workers: dict[str, Any]) -> None:
    dataset = Draws(["python", "numpy"], every=3, first=2)
    with loading(dataset) as loader:
        whole = [content(batch) for batch in islice(iter(loader), 8)]
    with loading(dataset, **workers) as loader:
        for _ in islice(iter(loader), 3):
            pass
        state = loader.state_dict()
    with loading(dataset, **workers) as resumed:
        resumed.load_state_dict(state)
        assert [content(batch) for batch in islice(iter(resumed), 5)] == whole[3:]


def test_one_generator_asked_for_while_several_samples_are_read_is_each_samples_own() -> None:
    expected = {}
    for index in range(24):
        with reading_samples(((0, 0, index),)):
            expected[0, index] = sample_generator().random(1).tobytes()
    assert samples(AsksForOne(())) == samples(AsksForOne(()), batch=12) == expected
    assert samples(AsksForOne(()), num_workers=2, worker_type="thread") == expected


@pytest.mark.watchdog(120)
def test_a_collator_that_draws_draws_the_same_in_each_run_and_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def read(**arguments: Any) -> dict[tuple[int, int], bytes]:
        return samples(Draws(()), field="noise", collate_fn=drawing_collator, **arguments)

    before = states()
    expected = read()
    assert states() == before and len(set(expected.values())) == 6
    assert (
        caplog.text.count("collate_fn drawing_collator draws from numpy.random, random for several rows at once") == 1
    )
    for workers in WORKERS[1:3]:
        assert read(**workers) == expected


def test_a_batch_transform_that_draws_draws_the_same_in_each_run_and_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = states()
    for workers in WORKERS[:3]:
        found = samples(FewNumbers(), batch_transform=AddsNoise(), **workers)
        assert len(set(found.values())) > 5, "each batch draws anew"
        if not workers["num_workers"]:
            assert samples(FewNumbers(), batch_transform=AddsNoise()) == found and states() == before
    assert "AddsNoise draws from numpy.random for several rows at once" in caplog.text


def test_generators_that_a_dataset_keeps_are_named(caplog: pytest.LogCaptureFixture) -> None:
    import albumentations

    from libai_data.data.transforms import Albumentations, Compose

    class Keeping(Draws):
        def __init__(self, **kept: Any) -> None:
            super().__init__(())
            self.__dict__.update(kept)

    flip = albumentations.Compose([albumentations.HorizontalFlip()])
    kept = {"rng": np.random.default_rng(1), "many": [Keeping(own=random.Random(2))], "shared": np.random.mtrand._rand}
    assert own_generators(Keeping(**kept)) == ["dataset.rng", "dataset.many[0].own"]
    assert "dataset.transform.random_generator" in own_generators(Keeping(transform=flip))
    assert not own_generators(Keeping(transform=Compose([Albumentations(flip)]), many=[0] * 10**6))
    samples(Keeping(**kept), num_workers=2, worker_type="thread")
    assert "Keeping keeps a random generator of its own (dataset.rng, dataset.many[0].own)" in caplog.text


def test_worker_threads_leave_reading_to_the_trainers_thread_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    readers = []

    class Noting(Draws):
        def __getitem__(self, index: int) -> Any:
            readers.append(threading.current_thread() is threading.main_thread())
            return super().__getitem__(index)

    samples(Noting(["python"]), num_workers=2, worker_type="thread")
    of_threads = readers.index(True)
    assert 0 < of_threads <= 4 and all(readers[of_threads:]), "all but the first sample, which is read twice"
    assert caplog.text.count("Noting is read in the trainer's own thread") == 1
    readers.clear()
    samples(Noting([]), num_workers=2, worker_type="thread")
    assert not any(readers), "threads read what draws from no shared generator"


def test_a_training_loop_that_draws_does_not_keep_threads_from_reading(caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(1) as training:

        class ReadWhileOthersDraw(Draws):
            def __getitem__(self, index: int) -> Any:
                if index >= 4 and threading.current_thread() is not threading.main_thread():
                    training.submit(np.random.random).result()
                return super().__getitem__(index)

        with loading(ReadWhileOthersDraw((), size=400), num_workers=2, worker_type="thread") as loader:
            assert [int(batch.index.tensor.numpy()[0]) for batch in islice(iter(loader), 100)] == [*range(0, 400, 4)]
            assert not loader._reader._executor._needs_one_thread  # type: ignore[union-attr]
    assert "draws from global random generators while threads read ReadWhileOthersDraw" in caplog.text


def test_two_threads_that_read_what_draws_at_the_same_time_are_told(caplog: pytest.LogCaptureFixture) -> None:
    both, known = threading.Barrier(2), set()

    class Meeting(Draws):
        def __getitem__(self, index: int) -> Any:
            if threading.get_ident() not in known:
                known.add(threading.get_ident())
                both.wait(60)
            return super().__getitem__(index)

    samples(Draws(["python"]))
    with ThreadPoolExecutor(1) as one:
        one.submit(samples, Draws(["numpy"])).result()
    assert "while another thread read" not in caplog.text
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(samples, Meeting(["python", "numpy"])) for _ in range(2)]:
            each.result()
    assert "Meeting was read while another thread read by another loader" in caplog.text
    assert "So samples may get other numbers in each run; draw from libai_data.data.random" in caplog.text


@pytest.mark.watchdog(120)
@pytest.mark.parametrize("inner", [{"num_workers": 0}, {"num_workers": 1, "worker_type": "thread"}])
def test_a_loader_within_a_sample_leaves_the_samples_draws_as_they_are(
    inner: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = ReadsByALoader(["python", "numpy"], size=8, **inner)
    expected = samples(dataset, batch=2)
    assert samples(dataset, batch=4) == samples(dataset, num_workers=2, start_method="fork") == expected
    for (_, index), drawn in expected.items():
        with reading_samples(((0, 0, index),)):
            assert np.frombuffer(drawn)[-2:].tolist() == sample_generator().random(2).tolist()
    assert len({np.frombuffer(drawn)[0] for drawn in expected.values()}) == 8
    assert "while another thread read" not in caplog.text


def test_a_thread_that_has_not_begun_to_wait_for_its_reader_reads_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_result = loader_threads.ThreadExecutor.next_result

    def waiting_late(self: loader_threads.ThreadExecutor) -> Any:
        while self._unfinished and not self.has_result():
            time.sleep(0.001)
        return next_result(self)

    monkeypatch.setattr(loader_threads.ThreadExecutor, "next_result", waiting_late)
    samples(ReadsByALoader(["python", "numpy"], size=4, num_workers=1, worker_type="thread"), batch=2)
    assert "while another thread read" not in caplog.text


@pytest.mark.watchdog(120)
@pytest.mark.parametrize("workers", WORKERS[:3], ids=WORKER_NAMES[:3])
def test_a_thread_that_reads_no_sample_is_refused_a_generator(workers: dict[str, Any]) -> None:
    with (
        pytest.raises(SampleError, match="asked for a sample's generator, but reads no sample") as caught,
        loading(ReadsByThreads(()), **workers) as loader,
    ):
        next(iter(loader))
    assert "sample_generator(stream=...)" in str(caught.value)
    assert len(set(samples(HandsOutGenerators(()), **workers).values())) == 24


def test_an_error_within_an_inner_read_batch_is_told_with_the_outer_samples_index() -> None:
    class Outer(Draws):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                with loading(DrawsFilled(["python"]), CyclicSampler(range(2**30, 2**30 + 8), 4)) as loader:
                    next(iter(loader))
                raise KeyError("outer")
            return super().__getitem__(index)

    with pytest.raises(SampleError, match="sample 3 of Outer"), loading(Outer(())) as loader:
        next(iter(loader))


def nested(data: st.DataObject, layers: int) -> Any:
    """A dataset with `RandomMap`s in several layers."""
    dataset: Any = RandomMap(Documents(12), with_noise)
    for _ in range(layers):
        kind = data.draw(st.sampled_from(["subset", "concat", "split", "wrap", "map", "one round"]))
        if kind == "subset":
            dataset = Subset(dataset, data.draw(st.integers(0, 2)), len(dataset))
        elif kind == "concat":
            dataset = ConcatDataset([dataset, dataset])
        elif kind == "split":
            dataset = random_split(dataset, [0.9, 0.1], seed=data.draw(st.integers(0, 3)))[0]
        elif kind == "wrap":
            dataset = Wrapped(dataset)
        elif kind == "map":
            dataset = Map(dataset, dict)
        else:
            dataset = OneRound(FilteredDataset(dataset, np.ones(len(dataset), bool)))
        dataset = RandomMap(dataset, with_noise)
    return dataset


class AddsNoise(BatchTransform):
    def __call__(self, fields: dict[str, np.ndarray], random: Any) -> None:
        fields["drawn"] += np.random.random()


class FewNumbers(Draws):
    def __init__(self) -> None:
        super().__init__(())

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "drawn": np.zeros(1)}


class Documents:
    """{"index": int64 [], "noise": float64 [n]}, which `RandomMap`s append to."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return {"index": index}


@settings(with_workers, max_examples=examples(60))
@given(data=st.data(), layers=st.integers(1, 4))
def test_random_maps_draw_other_numbers_wherever_they_lie(data: st.DataObject, layers: int) -> None:
    dataset = nested(data, layers)
    for index in range(len(dataset)):
        with reading_samples(((0, 0, index),)):
            noise = dataset[index]["noise"]
        with reading_samples(((0, 0, index),)):
            assert dataset[index]["noise"].tolist() == noise.tolist()
        assert len(noise) == layers + 1 == len(set(noise.tolist()))


@pytest.mark.parametrize("workers", WORKERS[:2], ids=WORKER_NAMES[:2])
def test_random_maps_over_a_blend_and_below_filters_and_packs_draw_other_numbers(workers: dict[str, Any]) -> None:
    base = RandomMap(Documents(10), with_noise)
    blend = BlendedDataset([RandomMap(base, with_noise), RandomMap(Wrapped(base), with_noise)], [1, 1])
    drawn = [np.frombuffer(row) for row in samples_of(RandomMap(blend, with_noise), **workers)]
    assert len(np.unique(drawn)) == 20 * 3, "also where two parts of a blend hold the same sample"
    packs = OneRound(PackedDataset(Map(base, only_noise), 1, lengths=np.ones(10, np.int64)))
    drawn = [np.frombuffer(row) for row in samples_of(RandomMap(Map(packs, only_noise), with_noise), **workers)]
    assert len(np.unique(drawn)) == 10 * 2


def only_noise(sample: Any) -> Any:
    noise = fields_of(sample)["noise"]
    return {"noise": getattr(noise, "tensor", noise)}


def samples_of(dataset: Any, **arguments: Any) -> list[bytes]:
    with loading(dataset, CyclicSampler(range(len(dataset)), 2), **arguments) as loader:
        batches = islice(iter(loader), len(dataset) // 2)
        return [row.tobytes() for batch in batches for row in batch.noise.tensor.numpy()]


def test_a_random_map_draws_the_same_after_a_retry_below_it() -> None:
    class Retrying(Wrapped):
        def __getitem__(self, index: int) -> Any:
            try:
                return self.inside[index]
            except OSError:
                return self.inside[index]

    failures = [False]

    def sometimes(sample: Any) -> Any:
        failures[0] = not failures[0]
        if failures[0]:
            raise OSError
        return sample

    plain = RandomMap(Map(RandomMap(Documents(4), with_noise), dict), with_noise)
    retried = RandomMap(Retrying(RandomMap(Map(Documents(4), sometimes), with_noise)), with_noise)
    for index in range(4):
        with reading_samples(((0, 0, index),)):
            expected = plain[index]["noise"].tolist()
        with reading_samples(((0, 0, index),)):
            assert retried[index]["noise"].tolist() == expected


@pytest.mark.watchdog(120)
@pytest.mark.parametrize("workers", WORKERS[:3], ids=WORKER_NAMES[:3])
def test_what_is_filtered_and_packed_draws_the_same_whoever_measures_or_reads_it(workers: dict[str, Any]) -> None:
    dataset = FilteredDataset(Draws(["python", "numpy"]), large)

    def read(batch: int, **arguments: Any) -> list[bytes]:
        with loading(dataset, CyclicSampler(dataset, batch), **arguments) as loader:
            return [row.tobytes() for read in islice(iter(loader), 12 // batch) for row in read.drawn.tensor.numpy()]

    before = states()
    expected = read(4)
    assert states() == before
    assert all(np.frombuffer(row)[1] > 0.4 for row in expected) and len(set(expected)) == 12
    assert read(3, **workers) == expected


def add_noise(sample: Any) -> dict[str, np.ndarray]:
    return {"tokens": sample["tokens"] + np.random.random(len(sample["tokens"]))}


seeded_noise = Seeded(lambda pixels: pixels + np.random.randint(200), takes="array")


def add_seeded_noise(sample: Any) -> dict[str, np.ndarray]:
    return {"tokens": sample["tokens"] + seeded_noise(np.zeros((1, 1), np.uint8)).sum()}


BELOW_OTHERS: dict[str, Callable[[Any], Any]] = {
    "seeded by a transform": lambda documents: PadTo8(Map(documents, add_seeded_noise)),
    "packed": lambda documents: PackedDataset(Map(documents, add_noise), 8),
    "packed by best fit": lambda documents: PackedDataset(Map(documents, add_noise), 8, cut=False),
    "packed, of known lengths": lambda documents: PackedDataset(
        Map(documents, add_noise), 8, lengths=documents.lengths
    ),
}


class RaggedDocuments(Documents):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.lengths = np.arange(size) % 7 + 1

    def __getitem__(self, index: int) -> Any:
        return {"tokens": np.full(self.lengths[index], float(index))}


class PadTo8(Map):
    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, lambda sample: {"tokens": np.resize(sample["tokens"], 8)})


@pytest.mark.parametrize("threads", [{"num_workers": 2, "worker_type": "thread"}, {"threads_per_worker": 4}], ids=str)
@pytest.mark.parametrize("kind", BELOW_OTHERS.values(), ids=BELOW_OTHERS.keys())
def test_threads_read_what_draws_below_something_that_puts_the_generators_back(
    kind: Any, threads: Any, monkeypatch: Any
) -> None:
    """The reading around it finds the generators as they were, and must learn of it nevertheless."""
    for module in (loader_threads, threaded_reader):
        monkeypatch.setattr(module, "_MOST_REREADS", 2)

    def tokens(**arguments: Any) -> list[Any]:
        documents = RaggedDocuments(150)
        loader = DataLoader(kind(documents), 8, shuffle=True, seed=1, **arguments)
        rows = [row for batch in loader for row in batch["tokens"].numpy().tolist()]
        loader.close()
        return rows

    assert tokens(**{"num_workers": 1, "start_method": "fork", **threads}) == tokens()


def large(sample: Any) -> bool:
    return float(sample["drawn"][1]) > 0.4


@pytest.mark.slow
def test_the_hash_seed_of_a_process_changes_no_samples() -> None:
    program = (
        "from tests.loader.test_draws import *\n"
        "import hashlib\n"
        "dataset = RandomMap(Draws(['python', 'numpy']), with_noise)\n"
        "rows = [samples(dataset), samples(dataset, num_workers=1, start_method='fork')]\n"
        "assert rows[0] == rows[1]\n"
        "print(hashlib.sha256(b''.join(rows[0].values())).hexdigest(), dataset.fingerprint())"
    )
    found = {
        run_to_end([sys.executable, "-c", program], 100, env={**os.environ, "PYTHONHASHSEED": seed}, check=True).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
