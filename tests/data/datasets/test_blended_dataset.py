"""Datasets made of datasets: their fields are compared, and what reads a batch at once still does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from libai_data.data.datasets import random_split
from libai_data.data.datasets import BlendedDataset, ConcatDataset, Subset
from libai_data.errors import SchemaError
from libai_data.data.random.sample_random import sample_generator, sample_generators
from libai_data.data.samplers import CyclicSampler
from tests.loader.streams import WORKER_NAMES, WORKERS, stream


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


@pytest.mark.parametrize("options", WORKERS, ids=WORKER_NAMES)
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


def test_different_fields_are_refused_by_name() -> None:
    with pytest.raises(SchemaError, match=r"dataset 1 .*\(Noisy\).*missing \['x'\], unexpected \['y'\]"):
        BlendedDataset([Noisy(3), Noisy(3, "y")], [1, 1])


def test_different_dtypes_are_refused_by_name() -> None:
    with pytest.raises(SchemaError, match=r"field 'x' of dataset 1 .*float32.*float64"):
        BlendedDataset([Noisy(3), Noisy(3, dtype=np.float32)], [1, 1])
