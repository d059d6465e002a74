"""Several threads in each worker: the same batches, sooner where storage answers late."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from libai_data.data.random.sample_random import sample_generator
from libai_data.data.samplers import CyclicSampler
from libai_data.errors import ConfigError, SampleError
from tests.deadline import stretched
from tests.loader.sample_datasets import Failing, FailingFilled, Numbers
from tests.loader.streams import WORKER_NAMES, WORKERS, loading, stream
from tests.properties import slowly


class Drawn:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return {"x": sample_generator().integers(1 << 40, size=3), "n": index}


class DrawnFromNumpy(Drawn):
    def __getitem__(self, index: int) -> Any:
        return {"x": np.random.randint(1 << 40, size=3) if index else np.zeros(3, np.int64), "n": index}


def stacked(samples: list[Any]) -> Any:
    return {name: np.stack([sample[name] for sample in samples]) for name in ("x", "n")}


@pytest.mark.parametrize("workers", [*WORKERS[:-1], slowly(WORKERS[-1])], ids=WORKER_NAMES)
@pytest.mark.parametrize("options", [slowly({}), {"collate_fn": stacked}], ids=["stacked", "collated"])
def test_threads_read_what_one_thread_reads(workers: dict[str, Any], options: dict[str, Any]) -> None:
    for dataset in (Drawn(), DrawnFromNumpy()):

        def batches(dataset: Any = dataset, **more: Any) -> Any:
            return stream(dataset, CyclicSampler(dataset, 16, shuffle=True, seed=2), 6, seed=2, **options, **more)

        assert batches(threads_per_worker=3, **workers) == batches()


@pytest.mark.parametrize("dataset", [Failing, FailingFilled])
def test_failures_are_named_and_replaced_as_by_one_thread(dataset: Any) -> None:
    def batches(**more: Any) -> Any:
        return stream(dataset(bad=[5, 9, 30]), batches=4, on_error="skip", **more)

    assert batches(threads_per_worker=3) == batches()
    with loading(dataset(bad=[2]), threads_per_worker=4) as loader, pytest.raises(SampleError, match=r"2"):
        next(iter(loader))
    assert stream(Numbers(), batches=2, threads_per_worker=4) == stream(Numbers(), batches=2)


class Meeting:
    """Samples of which, from the second batch on, four are asked for at once, or none is given."""

    def __init__(self) -> None:
        self.together = threading.Barrier(4, timeout=stretched(30))

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index >= 4:
            self.together.wait()
        return {"n": index}


def test_samples_of_a_task_are_read_at_the_same_time() -> None:
    dataset = Meeting()
    with loading(dataset, CyclicSampler(dataset, 4), threads_per_worker=4) as loader:
        batches = iter(loader)
        assert [next(batches).n.tensor.numpy().tolist() for _ in range(3)] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9, 10, 11],
        ]


def test_a_number_of_threads_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match="threads_per_worker is 0"), loading(Numbers(), threads_per_worker=0):
        pass
