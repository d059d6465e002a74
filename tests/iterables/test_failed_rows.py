"""Rows of streams that cannot be read: left out, counted, limited by the budget, and resumed exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.errors import ConfigError, SampleError
from libai_data.iterables import FilteredStream, MappedStream, PackedStream, from_iterable
from libai_data.iterables.failed_rows import Skipping
from tests.iterables.rows import Stateful, flat, sample, taken
from tests.loader.sample_datasets import PanicException
from tests.properties import examples, few_of, slowly


def decode(number: int, bad: frozenset[int] = frozenset({3, 4, 11})) -> Any:
    if number in bad:
        raise OSError(f"row {number} is truncated")
    return sample(number)


def decode_row(row: Any) -> Any:
    return decode(row["y"])


def of_shard(shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
    return map(decode, np.random.default_rng(epoch).permutation(22)[shard::num_shards].tolist())


class Decoding(Stateful):
    """Stands behind a row before it fails at it, as a reader of files does."""

    def __iter__(self) -> Iterator[Any]:
        return map(self._read, range(self.row, self.size))

    def _read(self, row: int) -> Any:
        self.row = row + 1
        return decode(row)


SOURCES: dict[str, Any] = {
    "map": (lambda: lambda epoch: map(decode, np.random.default_rng(epoch).permutation(22).tolist()), {}),
    "stateful": (lambda: Decoding(22), {}),
    "decoded": (lambda: MappedStream(Stateful(22), decode_row), {}),
    "filtered": (lambda: FilteredStream(MappedStream(Stateful(22), decode_row), lambda row: row["y"] % 2), {}),
    "packed": (lambda: PackedStream(MappedStream(Stateful(22), decode_row), 3), {}),
    "packed by best fit": (lambda: PackedStream(MappedStream(Stateful(22), decode_row), 5, cut=False, window=4), {}),
    "shuffled": (lambda: MappedStream(Stateful(22), decode_row), {"shuffle_buffer": 5, "seed": 3}),
    "shards": (lambda: of_shard, {"num_shards": 3}),
    "shards in processes": (lambda: of_shard, {"num_shards": 3, "num_workers": 2}),
}


def content(batch: Any) -> Any:
    return {name: array.tolist() for name, array in batch.items()}


@pytest.mark.parametrize("kind", few_of(SOURCES, "packed by best fit", "shuffled", "shards"))
@pytest.mark.parametrize("ends", ["short", "cycle"])
def test_every_cut_of_a_stream_with_failing_rows_continues_exactly(kind: str, ends: str) -> None:
    make, options = SOURCES[kind]
    fields = {"fields": ["x"]} if "packed" in kind else {}

    def packable(row: Any) -> Any:
        return {"x": row["x"]}

    def loader() -> Any:
        made = make()
        if fields:
            made.source = MappedStream(made.source, packable)
        return from_iterable(made, 2, ends=ends, on_error="skip", replacement_budget=1.0, **options)

    whole = loader()
    expected = [content(batch) for batch in islice(whole.numpy(), 14)]
    for cut in range(0, len(expected), 5 if options else 2):
        stopped, again = loader(), loader()
        assert [content(batch) for batch in islice(stopped.numpy(), cut)] == expected[:cut]
        again.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert [content(batch) for batch in islice(again.numpy(), len(expected) - cut)] == expected[cut:]


@settings(max_examples=examples(20))
@given(st.frozensets(st.integers(0, 21)), st.sampled_from([1, 3, 8]))
def test_the_other_rows_are_those_of_the_stream_without_the_failing_ones(bad: frozenset[int], rows: int) -> None:
    loader = from_iterable(lambda: map(partial(decode, bad=bad), range(22)), rows, on_error="skip")
    for epoch in (1, 2):
        assert flat(taken(loader)) == [number for number in range(22) if number not in bad]
        assert loader.stats()["skipped_samples"] == epoch * len(bad)


@pytest.mark.parametrize(
    "options",
    [{}, slowly({"num_shards": 2}), {"num_shards": 2, "num_workers": 2}, slowly({"shuffle_buffer": 3})],
)
def test_failing_rows_are_counted_and_logged_once(options: Any, caplog: pytest.LogCaptureFixture) -> None:
    source = of_shard if "num_shards" in options else lambda epoch: of_shard(0, 1, epoch)
    loader = from_iterable(source, 4, on_error="skip", **options)
    assert sorted(flat(taken(loader))) == [number for number in range(22) if number not in (3, 4, 11)]
    assert loader.stats()["skipped_samples"] == 3
    assert "Skipped a sample of" in caplog.text and "OSError: row 11 is truncated" in caplog.text


def test_rows_that_a_resume_skips_are_not_counted_again() -> None:
    stopped, again = (from_iterable(lambda: map(decode, range(22)), 4, on_error="skip") for _ in range(2))
    taken(stopped, 2)
    assert stopped.stats()["skipped_samples"] == 2
    again.load_state_dict(stopped.state_dict())
    assert flat(taken(again)) == [10, *range(12, 22)]
    assert again.stats()["skipped_samples"] == 1


def test_rows_over_which_a_library_in_rust_fails_are_skipped_but_ctrl_c_is_not() -> None:
    def decode_in_rust(row: Any) -> Any:
        if row["y"] == 5:
            raise PanicException
        return row

    loader = from_iterable(MappedStream(Stateful(22), decode_in_rust), 1, on_error="skip")
    assert flat(taken(loader)) == [*range(5), *range(6, 22)]
    for error in (KeyboardInterrupt, SystemExit, GeneratorExit):
        rows = Skipping(iter(partial(raise_, error), None), "rows")
        with pytest.raises(error):
            next(rows)


@pytest.mark.parametrize("kind", [MappedStream, FilteredStream])
def test_a_function_that_stops_the_iteration_fails_instead_of_ending_the_epoch(kind: Any) -> None:
    def known(row: Any) -> Any:
        return row if row["y"] != 3 else next(iter(()))

    loader = from_iterable(kind(Stateful(22), known), 1)
    with pytest.raises(SampleError, match=r"known raised StopIteration, for example by next"):
        list(loader)
    loader = from_iterable(kind(Stateful(22), known), 1, on_error="skip")
    assert flat(taken(loader)) == [*range(3), *range(4, 22)]


def raise_(error: type[BaseException]) -> None:
    raise error


@pytest.mark.parametrize("good", [0, 1])
def test_more_failing_rows_than_the_budget_allows_end_the_run(good: int) -> None:
    loader = from_iterable(
        lambda: map(partial(decode, bad=frozenset(range(good, 5000))), range(5000)), 1, on_error="skip"
    )
    remedy = r"Repair the data, or raise replacement_budget"
    with pytest.raises(SampleError, match=rf"skipped \d+ of 1000 samples of .* OSError (999|1000) times.*{remedy}"):
        list(loader)


@pytest.mark.parametrize("wrapped", [lambda rows: rows, lambda rows: map(dict, rows)])
def test_a_generator_that_ends_by_its_error_ends_the_run_instead_of_the_epoch(wrapped: Any) -> None:
    loader = from_iterable(lambda: wrapped(decode(number) for number in range(8)), 1, on_error="skip")
    with pytest.raises(SampleError, match=r"cannot continue .* after OSError: row 3 is truncated: .* MappedStream"):
        list(loader)


def test_generators_end_by_their_error_and_lists_and_quarantine_are_refused() -> None:
    loader = from_iterable(MappedStream(lambda: (decode(each) for each in range(8)), dict), 1, on_error="skip")
    with pytest.raises(SampleError, match="an error ends a Python generator"):
        list(loader)
    with pytest.raises(ConfigError, match="use Map, which"):
        MappedStream([1, 2], decode)
    with pytest.raises(ConfigError, match="a stream has none; use on_error='skip'"):
        from_iterable(lambda: map(decode, range(4)), 1, on_error="quarantine", quarantine_file="x")
