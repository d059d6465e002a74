from __future__ import annotations

import cProfile
import random
from itertools import islice
from typing import Any, Callable

import numpy as np
import pytest

from libai_data import DataLoader
from libai_data.data.samplers import CyclicSampler
from libai_data.data.transforms import Albumentations, Seeded
from libai_data.errors import ConfigError
from tests.data.transforms import foreign_transforms
from tests.data.transforms.foreign_transforms import Photographs
from tests.data.transforms.pictures import as_sample, photograph

MAKERS = [
    foreign_transforms.flowvision_transform,
    foreign_transforms.albumentations_transform,
    foreign_transforms.torch_transform,
]


def samples(transform: Any, micro_batch: int = 4, **arguments: Any) -> list[bytes]:
    """Two epochs of samples, in their order."""
    dataset = Photographs(transform, photograph()[:60, :80])
    loader = DataLoader(dataset, CyclicSampler(dataset, micro_batch), seed=2, **arguments)
    found: list[bytes] = []
    for batch in islice(iter(loader), 24 // micro_batch):
        found.extend(row.tobytes() for row in batch.images.tensor.numpy())
    loader.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS, ids=["flowvision", "albumentations", "torch"])
def test_other_libraries_draw_the_same_whoever_reads_the_sample(make: Callable[[], Any]) -> None:
    expected = samples(make())
    assert len(set(expected)) == 24, "each sample is drawn anew in each epoch"
    assert samples(make(), micro_batch=6) == expected
    assert samples(make(), num_workers=2, worker_type="thread") == expected
    assert samples(make(), num_workers=2) == expected


@pytest.mark.parametrize("make", MAKERS[::2], ids=["flowvision", "torch"])
def test_generators_that_all_code_shares_are_as_before(make: Callable[[], Any]) -> None:
    import oneflow as flow
    import torch

    transform = make()

    def draws() -> list[float]:
        return [random.random(), np.random.random(), torch.rand(1).item(), flow.rand(1).item()]

    for seed in (random.seed, np.random.seed, torch.manual_seed, flow.manual_seed):
        seed(5)
    expected = draws()
    for seed in (random.seed, np.random.seed, torch.manual_seed, flow.manual_seed):
        seed(5)
    as_sample(transform, photograph())
    assert draws() == expected


def test_what_is_seeded_for_each_image_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    import oneflow as flow

    expected = samples(Seeded(lambda image: flow.rand(2).numpy()))
    assert len(set(expected)) == 24 and "OneFlow" not in caplog.text
    with cProfile.Profile() as profile:
        assert samples(Seeded(lambda image: flow.rand(2).numpy())) == expected
    assert any(entry.code for entry in profile.getstats())


def test_generators_are_put_back_after_an_error() -> None:
    def failing(image: Any) -> None:
        random.random()
        raise ZeroDivisionError

    before = random.getstate()
    with pytest.raises(ZeroDivisionError):
        as_sample(Seeded(failing), photograph())
    assert random.getstate() == before


def test_a_transform_is_given_what_it_takes() -> None:
    assert as_sample(Seeded(lambda image: np.asarray(image.size)), photograph()).tolist() == [640, 427]
    assert as_sample(Seeded(lambda image: np.asarray(image.shape), "array"), photograph()).tolist() == [427, 640, 3]


def test_what_cannot_be_seeded_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no set_random_seed"):
        Albumentations(lambda image: image)
    with pytest.raises(ConfigError, match="Did you mean 'pillow'"):
        Seeded(lambda image: image, takes="pilow")
