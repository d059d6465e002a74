"""How samples are read: one by one, together, or straight into the batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.datasets import BlendedDataset
from libai_data.data.samplers import SingleRoundSampler
from libai_data.errors import DataPipelineError, SampleError
from libai_data.loader.reading import row_slices
from libai_data.loader.row_writer import _MARKS
from libai_data.structures import origin_of
from tests.deadline import stretched
from tests.loader.sample_datasets import Numbers, NumbersFilled, NumbersTogether, stack_dicts, unstoppable_collator
from tests.loader.streams import WORKER_NAMES, WORKERS, content, loading, stream
from tests.properties import slowly

EVERYWHERE = pytest.mark.parametrize("workers", [*WORKERS[:3], slowly(WORKERS[3])], ids=WORKER_NAMES)
WITHOUT_SPAWN = pytest.mark.parametrize("workers", WORKERS[:3], ids=WORKER_NAMES[:3])


@given(count=st.integers(0, 300), parts=st.integers(1, 9))
def test_rows_are_cut_into_parts_of_nearly_equal_length(count: int, parts: int) -> None:
    slices = row_slices(count, parts)
    assert [row for rows in slices for row in range(rows.start, rows.stop)] == list(range(count))
    lengths = [rows.stop - rows.start for rows in slices]
    assert len(lengths) == min(count, parts)
    assert not lengths or max(lengths) - min(lengths) <= 1


class Counting(Numbers):
    """Notes how it was read; for readers in this process."""

    def __init__(self, size: int = 64) -> None:
        super().__init__(size)
        self.calls: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        self.calls.append(index)
        return super().__getitem__(index)


class CountingTogether(Counting, NumbersTogether):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        self.calls.append(list(indices))
        return super().__getitems__(indices)


class CountingFilled(Counting, NumbersFilled):
    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        self.calls.append((indices.tolist(), {name: array.shape for name, array in out.items()}))
        super().read_batch(indices, out)


def test_a_dataset_that_fills_batches_is_asked_once_a_batch() -> None:
    dataset = CountingFilled()
    with loading(dataset) as loader:
        list(islice(loader, 3))
    # The very first sample tells the schema.
    assert dataset.calls == [
        0,
        ([1, 2, 3], {"index": (3,), "values": (3, 3)}),
        ([4, 5, 6, 7], {"index": (4,), "values": (4, 3)}),
        ([8, 9, 10, 11], {"index": (4,), "values": (4, 3)}),
    ]


@pytest.mark.parametrize(("collate_fn", "first"), [(None, [[0], [1, 2, 3]]), (stack_dicts, [[0, 1, 2, 3]])])
def test_a_dataset_that_returns_samples_together_is_asked_so(collate_fn: Any, first: list[list[int]]) -> None:
    dataset = CountingTogether()
    with loading(dataset, collate_fn=collate_fn) as loader:
        list(islice(loader, 2))
    assert dataset.calls == [*first, [4, 5, 6, 7]]


class OtherDtypes(Numbers):
    """As a Hugging Face dataset in numpy's format: scalars are float64 by `[index]`, and float32 by `__getitems__`."""

    def __getitem__(self, index: int) -> Any:
        return {"x": np.float64(index)}

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        if 5 in indices:
            raise OSError("truncated")
        return [{"x": np.float32(index)} for index in indices]


@pytest.mark.parametrize("collate_fn", [None, stack_dicts])
def test_samples_that_are_returned_together_are_never_read_by_index(collate_fn: Any) -> None:
    dataset = OtherDtypes(8)
    sampler = SingleRoundSampler(dataset, 4)
    with loading(dataset, sampler, collate_fn=collate_fn, on_error="skip", replacement_budget=1) as loader:
        batches = [batch["x"].numpy() for batch in loader]
    assert [batch.dtype for batch in batches] == [np.float32] * 2
    assert batches[0].tolist() + batches[1].tolist()[:1] == [0, 1, 2, 3, 4]


def test_each_sample_but_the_first_is_read_exactly_once() -> None:
    dataset = Counting(48)
    with loading(dataset, SingleRoundSampler(dataset, 5), num_workers=3, worker_type="thread") as loader:
        assert sum(1 for _ in loader) == 10
    # The last batch is filled up with the last sample, which is read for each of its rows.
    assert sorted(dataset.calls) == sorted([0, *range(48), 47, 47])


class ShortAnswer(NumbersTogether):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return super().__getitems__(indices)[:-1]


@WITHOUT_SPAWN
def test_too_few_samples_from_getitems_are_refused(workers: dict[str, Any]) -> None:
    with pytest.raises(SampleError, match=r"ShortAnswer.*__getitems__ returned \d samples for \d indices"):
        stream(ShortAnswer(), batches=1, **workers)


@pytest.mark.parametrize(
    ("answer", "kind"), [(None, "NoneType"), (7, "int"), ({"index": 1, "other": 2}, "dict"), ("ab", "str")]
)
def test_what_is_no_list_of_samples_from_getitems_is_named(
    answer: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NumbersTogether, "__getitems__", lambda *_: answer)
    with pytest.raises(SampleError, match=rf"__getitems__ returned a {kind} for \d indices; return a list"):
        stream(NumbersTogether(), batches=1)


class LeavesRows(NumbersFilled):
    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        out["index"][...] = indices


class SetsAnother(NumbersFilled):
    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        super().read_batch(indices, out)
        out["index"] = indices


class AddsOne(NumbersFilled):
    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        super().read_batch(indices, out)
        out["more"] = indices


class LeavesSample17(NumbersFilled):
    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        before = {name: array.copy() for name, array in out.items()}
        super().read_batch(indices, out)
        for name in out:
            out[name][indices == 17] = before[name][indices == 17]


class FillsABeginning(NumbersFilled):
    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        out["index"][...] = indices
        out["values"][:, :1] = 1


class FillsAnEnd(NumbersFilled):
    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        out["index"][...] = indices
        out["values"][:, 2:] = 1


class LeavesAFieldOfSample17:
    """Has fields at equal distances in the memory of a batch."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return {name: np.full(2, index) for name in "abcd"}

    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        for name in out:
            keeps = (indices == 17) & (name == "c")
            out[name][~keeps] = indices[~keeps, None]


@WITHOUT_SPAWN
@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (LeavesRows(), r"read_batch did not fill row 0 of out\['\w+'\]"),
        (LeavesSample17(), r"read_batch did not fill row \d of out\['\w+'\]"),
        (LeavesAFieldOfSample17(), r"read_batch did not fill row \d of out\['c'\]"),
        (FillsABeginning(), r"read_batch did not fill row 0 of out\['values'\]"),
        (FillsAnEnd(), r"read_batch did not fill row 0 of out\['values'\]"),
        # Read in rows that are not consecutive.
        (BlendedDataset([NumbersFilled(), LeavesSample17()], [1, 1]), "read_batch did not fill row"),
        (SetsAnother(), r"read_batch assigns a new array to out\['index'\]; fill"),
        (AddsOne(), r"read_batch assigns a new array to out\['more'\]; fill"),
    ],
    ids=[
        *("leaves rows", "leaves a later row", "leaves one field", "fills a beginning", "fills an end"),
        "leaves a row of a blend",
        *("sets another array", "adds one"),
    ],
)
def test_a_read_batch_that_does_not_fill_its_rows_is_refused(workers: Any, dataset: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        stream(dataset, batches=40, **workers)


class FilledWithMarks:
    """What it has may be what a check could take for unfilled rows; and it spoils what it is given."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"label": np.uint8(_MARKS[index % 2])}

    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        out["label"][...] = np.array(_MARKS)[indices % 2]
        indices[...] = 0
        out.clear()


def test_a_read_batch_may_fill_rows_with_anything() -> None:
    with loading(FilledWithMarks()) as loader:
        batch = next(iter(loader.numpy()))
    assert batch["label"].tolist() == [*_MARKS, *_MARKS]
    rows = origin_of(batch).rows
    assert rows is not None
    assert rows.indices.tolist() == [0, 1, 2, 3]


def test_a_slow_sample_does_not_stall_the_others_of_its_batch() -> None:
    """All other samples of the batch and of the prefetched ones are read while one worker is held up."""
    others = threading.Semaphore(0)
    go_on = threading.Event()

    class OneSlow(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 1:
                # Only the worker's own part of the batch, samples 1 to 2, waits with it.
                assert go_on.wait(stretched(30))
            elif index >= 3:
                others.release()
            return super().__getitem__(index)

    with loading(OneSlow(400), None, num_workers=2, worker_type="thread", prefetch=2) as loader:
        found: list[Any] = []
        trainer = threading.Thread(target=lambda: found.append(content(next(iter(loader)))))
        trainer.start()
        for _ in range(9):  # Samples 3 to 11.
            assert others.acquire(timeout=stretched(30))
        assert not found
        go_on.set()
        trainer.join()
    assert found == stream(Numbers(400), batches=1)


@EVERYWHERE
def test_a_collator_that_stops_iteration_does_not_end_the_loop_in_silence(workers: dict[str, Any]) -> None:
    with pytest.raises(DataPipelineError, match="StopIteration"):
        stream(Numbers(), batches=2, collate_fn=unstoppable_collator, **workers)
