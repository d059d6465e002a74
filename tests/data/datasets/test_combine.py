"""Datasets made of datasets: every sample once, fields compared, and what reads a batch at once still does."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data import DataLoader
from libai_data.data.datasets import BlendedDataset, ConcatDataset, FilteredDataset, Subset, random_split
from libai_data.data.random.sample_random import sample_generator, sample_generators
from libai_data.data.samplers import CyclicSampler, SingleRoundSampler
from libai_data.delivery.build import build_nlp_train_loader
from libai_data.errors import ConfigError, SchemaError
from libai_data.iterables.from_iterable import from_iterable
from tests.loader.streams import WORKER_NAMES, WORKERS, stream
from tests.properties import slowly

sizes = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_subset_of_indices_has_these_samples_in_their_order(kind: Any) -> None:
    part = Subset(list(range(10)), kind([7, 2, 2, 9]))
    assert [part[index] for index in range(len(part))] == [7, 2, 2, 9]
    assert part.fingerprint() == Subset(list(range(10)), [7, 2, 2, 9]).fingerprint()
    assert part.fingerprint() != Subset(list(range(10)), [7, 2, 9, 2]).fingerprint()
    assert len(Subset(list(range(3)), [])) == 0


@given(sizes)
def test_datasets_come_one_behind_the_other(sizes: list[int]) -> None:
    parts = [[(number, index) for index in range(size)] for number, size in enumerate(sizes)]
    whole = ConcatDataset(parts)
    assert [whole[index] for index in range(len(whole))] == [sample for part in parts for sample in part]


@pytest.mark.parametrize("join", [ConcatDataset, lambda parts: BlendedDataset(parts, [1, 1])])
def test_a_join_refuses_a_dataset_that_has_grown_since(join: Any) -> None:
    rows = [{"x": 1.0}, {"x": 2.0}]
    whole = join([[{"x": 0.0}], rows])
    assert len(whole) == 3
    rows.append({"x": 3.0})
    message = r"dataset 1 of a (Concat|Blended)Dataset, a list, has 3 samples, but had 2 when the datasets were joined"
    for use in (lambda: len(whole), lambda: DataLoader(whole), lambda: CyclicSampler(whole, 1), lambda: join([whole])):
        with pytest.raises(ConfigError, match=message):
            use()


@given(st.integers(0, 20), st.data())
def test_a_part_is_a_contiguous_piece(size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    part = Subset(list(range(size)), start, stop)
    assert [part[index] for index in range(len(part))] == list(range(start, stop))


@pytest.mark.parametrize("index", [-1, 3, 100])
def test_an_index_outside_is_refused_with_the_bounds(index: int) -> None:
    # A part that took negative indices would give samples that belong to another part.
    for dataset in (ConcatDataset([[1, 2], [3]]), Subset([0, 1, 2, 3, 4], 1, 4), random_split(range(6), [1, 1])[0]):
        with pytest.raises(IndexError, match=f"index {index} .*3 samples"):
            dataset[index]


class OfLength:
    """Ones, of which `length` says how many there are."""

    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> Any:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"x": np.ones(3)}


@pytest.mark.parametrize(
    ("samples", "other", "message"),
    [
        ((np.ones(2), "text"), (np.ones(3), "other"), ""),
        ({"x": {"y": [1, 2]}}, {"x": {"y": [3, 4, 5]}}, ""),
        (np.ones(2), np.ones(2), ""),
        ({"x": 1, "note": None}, {"x": 1, "note": None}, ""),
        ((np.ones(2), "text"), (np.ones(2), 5), r"'\.1' of .* is int64 with 0 dims, but .* is a str"),
        ({"x": {"y": [1, 2]}}, {"x": {"z": [1, 2]}}, r"missing \['x\.y'\], unexpected \['x\.z'\]"),
    ],
)
def test_samples_of_any_form_are_blended_and_compared(samples: Any, other: Any, message: str) -> None:
    if not message:
        assert len(BlendedDataset([[samples], [other]], [1, 1])) == 2
        return
    with pytest.raises(SchemaError, match=message):
        BlendedDataset([[samples], [other]], [1, 1])


TAKEN: list[Callable[[Any], Any]] = [
    lambda dataset: CyclicSampler(dataset, 2),
    lambda dataset: SingleRoundSampler(dataset, 2),
    lambda dataset: DataLoader(dataset, [[0]]),
    lambda dataset: build_nlp_train_loader(dataset, 2, num_workers=0),
    lambda dataset: ConcatDataset([dataset]),
    lambda dataset: Subset(dataset, 0, 1),
    lambda dataset: random_split(dataset, [0.5, 0.5], 1),
    lambda dataset: BlendedDataset([dataset], [1]),
    lambda dataset: FilteredDataset(dataset, [True]),
    lambda dataset: from_iterable(dataset, 2),
]


@pytest.mark.parametrize("take", TAKEN)
def test_a_dataset_without_a_length_is_refused_by_its_type(take: Callable[[Any], Any]) -> None:
    for length in (2.0, -3, 2**63, None, "4", RuntimeError("no"), NotImplementedError()):
        with pytest.raises(ConfigError, match=r"dataset is a OfLength, whose len\(\) raises"):
            take(OfLength(length))
    with pytest.raises(ConfigError, match=r"dataset is the class OfLength; pass an object of it"):
        take(OfLength)


@pytest.mark.parametrize("take", TAKEN)
def test_a_table_whose_indices_are_columns_is_refused(take: Callable[[Any], Any]) -> None:
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    for table, rows in ((pandas.DataFrame([[1, 2]]), "to_dict"), (pyarrow.table({"a": [1]}), "to_pylist")):
        with pytest.raises(ConfigError, match=rf"\[index\] is a column; pass its rows: table.{rows}"):
            take(table)


@pytest.mark.parametrize("take", TAKEN)
@pytest.mark.parametrize("labels", [[1, 0], [1, 2], ["a", "b"]])
def test_a_series_whose_labels_are_not_places_is_refused(take: Callable[[Any], Any], labels: list[Any]) -> None:
    series = pytest.importorskip("pandas").Series([5, 6], index=labels)
    with pytest.raises(ConfigError, match=r"\[index\] is a value by its label; pass its rows: series.to_numpy\(\)"):
        take(series)
    assert ConcatDataset([series.reset_index(drop=True)])[1] == 6


@pytest.mark.parametrize("take", TAKEN)
def test_a_mapping_of_datasets_is_refused(take: Callable[[Any], Any]) -> None:
    said = r"a mapping of \['train'\]; pass one|dict is not an iterable of samples|must be a dataset|dict is a stream"
    with pytest.raises(ConfigError, match=said):
        take({"train": [1, 2]})


@pytest.mark.parametrize("take", [take for take in TAKEN if "FilteredDataset" not in take.__code__.co_names])
def test_a_length_may_be_a_number_of_numpy_and_huge(take: Callable[[Any], Any]) -> None:
    for length in (np.int64(4), np.uint8(4), 2**62):
        take(OfLength(length))


fractions = st.lists(st.sampled_from([0, 0.1, 0.25, 0.3, 1, 2, 17]), min_size=1, max_size=6).filter(any)


@given(st.integers(0, 700), fractions, st.integers(-5, 2**64))
def test_parts_cover_the_dataset_once_and_have_their_fractions(size: int, fractions: list[float], seed: int) -> None:
    parts = random_split(range(size), fractions, seed)
    assert sorted(sample for part in parts for sample in map(part.__getitem__, range(len(part)))) == list(range(size))
    exact = [Fraction(repr(fraction)) for fraction in fractions]
    for part, fraction in zip(parts, exact):
        assert abs(len(part) - size * fraction / sum(exact)) < 1


def test_the_seed_alone_decides() -> None:
    first, again, other = (random_split(range(500), [1, 1], seed)[0] for seed in (1, 1, 2))
    samples = [[part[index] for index in range(250)] for part in (first, again, other)]
    assert samples[0] == samples[1] != samples[2]
    assert samples[0] != sorted(samples[0])
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


class Noisy:
    """Samples that draw, one by one or together."""

    def __init__(self, size: int, name: str = "x", dtype: Any = np.float64) -> None:
        self.size = size
        self.name = name
        self.dtype = dtype

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {self.name: np.array([self.size, index, sample_generator().random()], dtype=self.dtype)}


class NoisyTogether(Noisy):
    """Also reads together, and remembers that it did."""

    calls: list[int]

    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        self.calls.append(len(indices))
        for row, (index, generator) in enumerate(zip(indices, sample_generators())):
            out["x"][row] = self.size, index, generator.random()

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.calls = []


class NoisyParts(NoisyTogether):
    """Is told the parts."""

    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray], parts: Any) -> None:  # type: ignore[override]
        assert parts == {}
        super().read_batch(indices, out)


def blend_of(kinds: Any) -> BlendedDataset:
    return BlendedDataset([kind(size) for kind, size in zip(kinds, (5, 30, 12))], [1, 2, 0.5])


def loaded(dataset: Any, **options: Any) -> Any:
    return stream(dataset, CyclicSampler(dataset, 8, shuffle=True, seed=3), 12, seed=7, **options)


EXPECTED = blend_of([Noisy] * 3)


@pytest.mark.parametrize("options", [*WORKERS[:3], slowly(WORKERS[3])], ids=WORKER_NAMES)
def test_every_kind_of_worker_gives_the_same_blend(options: Any) -> None:
    assert loaded(blend_of([Noisy] * 3), **options) == loaded(EXPECTED)
    assert loaded(blend_of([NoisyTogether] * 3), **options) == loaded(EXPECTED)


@pytest.mark.parametrize("kinds", [(NoisyTogether,) * 3, (NoisyParts,) * 3, (NoisyTogether, NoisyParts, NoisyTogether)])
def test_members_read_their_rows_together_and_draw_the_same(kinds: Any) -> None:
    blend = blend_of(kinds)
    assert loaded(blend) == loaded(EXPECTED)
    # But for the very first sample, each batch is one call a dataset.
    assert sum(blend.datasets[1].calls) > 2 * len(blend.datasets[1].calls) > 0


def test_one_member_that_cannot_read_together_makes_all_read_one_by_one() -> None:
    blend = blend_of((NoisyTogether, Noisy, NoisyTogether))
    assert not hasattr(blend, "read_batch")
    assert loaded(blend) == loaded(EXPECTED)


def test_parts_of_datasets_read_together_too() -> None:
    for make in (
        lambda kind: ConcatDataset([Subset(kind(30), 3, 20), kind(9)]),
        lambda kind: random_split(kind(40), [1, 3], seed=2)[1],
    ):
        assert hasattr(make(NoisyTogether), "read_batch")
        assert not hasattr(make(Noisy), "read_batch")
        assert loaded(make(NoisyTogether)) == loaded(make(Noisy))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Subset(range(10), [0, 10]), "the index 10; the dataset has 10"),
        (lambda: Subset(range(10), [-1]), "the index -1"),
        (lambda: Subset(range(10), [0.5]), "give a list"),  # type: ignore[list-item]
        (lambda: Subset(range(10), 3), "give a list"),
        (lambda: Subset(range(5), -1, 2), "from -1 to 2 .*5 samples"),
        (lambda: Subset(range(5), 2, 1), "from 2 to 1 .*5 samples"),
        (lambda: Subset(range(5), 0, 6), "from 0 to 6 .*5 samples"),
        (lambda: ConcatDataset([]), "no datasets"),
        (lambda: ConcatDataset([OfLength(2**62)] * 2), r"ConcatDataset, whose len.* raises OverflowError"),
        *(
            (lambda wrong=wrong: random_split(range(9), wrong), r"fractions (is|are)")
            for wrong in ([], [0], [1, -1], [1, float("nan")], ["half"], [True])
        ),
        (lambda: random_split(range(9), [1, 1], 0.5), r"seed is 0\.5"),  # type: ignore[arg-type]
        (
            lambda: BlendedDataset([Noisy(3), Noisy(3, "y")], [1, 1]),
            r"dataset 1 .*\(Noisy\).*missing \['x'\], unexpected \['y'\]",
        ),
        (
            lambda: BlendedDataset([Noisy(3), Noisy(3, dtype=np.float32)], [1, 1]),
            r"field 'x' of dataset 1 .*float32.*float64",
        ),
    ],
)
def test_what_makes_no_dataset_is_refused_with_the_reason(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ConfigError, SchemaError), match=message):
        make()


def test_parts_of_a_dataset_that_grows_keep_their_samples() -> None:
    samples = list(range(20))
    parts = random_split(samples, [0.5, 0.5])
    before = [[part[index] for index in range(len(part))] for part in parts]
    samples.append(20)
    assert [[part[index] for index in range(len(part))] for part in parts] == before


def test_an_index_that_is_no_int_is_refused() -> None:
    for dataset in (ConcatDataset([range(3)]), Subset(range(9), 2, 5), random_split(range(6), [1, 1])[0]):
        with pytest.raises(TypeError, match="float"):
            dataset[1.5]  # type: ignore[index]
