"""Images read straight into the rows of a batch are those that are read one by one."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from libai_data import DataLoader
from libai_data.data.datasets import ImageFolderDataset
from libai_data.data.samplers import CyclicSampler
from libai_data.data.transforms import (
    ColorJitter,
    Compose,
    ImageToFloat,
    RandAugment,
    RandomErasing,
    RandomFlip,
    RandomResizedCrop,
)
from libai_data.errors import SampleError
from libai_data.structures import DistTensorData, Instance
from tests.data.transforms.pictures import encoded, photograph
from tests.loader.sample_datasets import OneByOne
from tests.loader.streams import WORKER_NAMES, WORKERS, stream
from tests.properties import slowly

FLOATS = Compose([RandomResizedCrop(24), RandomFlip(), ImageToFloat([0.5], [0.25]), RandomErasing()])
BYTES = Compose([RandomResizedCrop(24), RandAugment(), ColorJitter(0.4, 0.4, 0.4, 0.1)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photographs")
    for number in range(12):
        path = root / f"class{number % 3}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(photograph()[10 * number : 10 * number + 200, : 300 + number]))
    return root


@pytest.mark.parametrize(
    ("transform", "workers"),
    [*((FLOATS, each) for each in WORKERS), (BYTES, WORKERS[0]), *(slowly(BYTES, each) for each in WORKERS[1:])],
    ids=[f"{form}-{name}" for form in ("floats", "bytes") for name in WORKER_NAMES],
)
def test_read_together_samples_are_those_read_one_by_one(folder: Path, transform: Any, workers: Any) -> None:
    dataset = ImageFolderDataset(folder, transform)
    expected = stream(OneByOne(dataset), batches=6)
    assert stream(dataset, batches=6, **workers) == expected
    assert len({fields["images"][2] for _, fields in expected}) == 6


class WithNumbers(ImageFolderDataset):
    def __getitem__(self, index: int) -> Instance:
        sample = super().__getitem__(index)
        sample.set("number", DistTensorData(np.array(index)))
        return sample


def test_samples_that_a_subclass_makes_are_read_by_it(folder: Path) -> None:
    dataset = WithNumbers(folder, FLOATS)
    loader = DataLoader(dataset, CyclicSampler(dataset, 4))
    assert [batch.number.tensor.numpy().tolist() for batch in islice(iter(loader), 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_truncated_image_is_named_with_its_index_and_file_or_skipped_if_asked(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    for number in range(8):
        Image.fromarray(photograph()).save(tmp_path / "cat" / f"{number}.jpg")
    (tmp_path / "cat" / "5.jpg").write_bytes(encoded(photograph())[:5000])
    dataset = ImageFolderDataset(tmp_path, FLOATS)
    with pytest.raises(SampleError, match=r"(?s)sample 5 of ImageFolderDataset: .*5\.jpg cannot be read .*truncated"):
        stream(dataset, batches=2, num_workers=2)
    loader = DataLoader(dataset, CyclicSampler(dataset, 4), on_error="skip")
    assert len(list(islice(iter(loader), 2))) == 2
    assert loader.stats()["skipped_samples"] == 1
    loader.close()


def test_images_of_different_sizes_are_refused_with_their_index(folder: Path) -> None:
    with pytest.raises(
        SampleError, match=r"sample \d+ of ImageFolderDataset has another schema than the first sample: .*images: "
    ):
        stream(ImageFolderDataset(folder), batches=2)
