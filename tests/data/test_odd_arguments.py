"""Each argument of datasets and transforms works with an odd value, or is refused by an error of this package."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from libai_data.data import transforms
from libai_data.data.datasets import (
    BertDataset,
    BlendedDataset,
    ConcatDataset,
    FilteredDataset,
    GPTDataset,
    LabelledImages,
    Map,
    OneRound,
    PackedDataset,
    RandomMap,
    RandomPart,
    RobertaDataset,
    Subset,
    T5Dataset,
    random_split,
)
from libai_data.data.random.sample_random import reading_samples, sample_generator
from libai_data.data.samplers import CyclicSampler
from libai_data.data.sources import IndexedWriter
from libai_data.errors import DataPipelineError
from libai_data.loader import DataLoader
from tests.data.datasets.sentence_corpora import Tokenizer
from tests.engine.tiny import TinyDataset

ODD: list[Any] = [
    *(0, -1, -(2**63), 2**70, 1.5, 2.0, math.inf, math.nan, True, None, "", "x", b"x", object(), int),
    *([], [0.5], [1, 2], [[1, 2]], (None,), {"a": 1}, {1: 2}, np.int64(3), np.array([1, 2]), lambda *arguments: 1),
]
DATASET = TinyDataset(20)
NUMPY: Any = np


class Pictures:
    identity = "pictures"

    def __len__(self) -> int:
        return 8

    def read(self, index: int) -> tuple[np.ndarray, int]:
        return np.full((20, 30, 3), index, np.uint8), index

    def name(self, index: int) -> str:
        return f"picture {index}"

    def fingerprint(self) -> dict[str, Any]:
        return {}


def first_batch(dataset: Any) -> None:
    next(iter(DataLoader(dataset, CyclicSampler(dataset, 2))))


def through(*parts: Any) -> None:
    first_batch(LabelledImages(Pictures(), transforms.Compose(list(parts))))


def on_pixels(transform: Any) -> None:
    through(transform, transforms.Resize((16, 16)), transforms.ImageToFloat())


def mixed(transform: Any) -> None:
    images = LabelledImages(Pictures(), transforms.ImageToFloat())
    next(iter(DataLoader(images, CyclicSampler(images, 2), batch_transform=transform)))


def in_the_middle(function: Any) -> None:
    tokens = np.arange(4, 12)
    first_batch(RandomMap([{"input_ids": tokens, "labels": tokens + 1}] * 8, function))


def corpus(folder: Path) -> Path:
    with IndexedWriter(folder / "corpus", np.uint16) as writer:
        for number in range(30):
            writer.add_document([np.arange(5) + number % 7, np.arange(3) + 1, np.arange(4)])
    return folder / "corpus"


def of_sentences(folder: Path) -> dict[str, Any]:
    return {"name": "train", "tokenizer": Tokenizer(), "data_prefix": corpus(folder), "max_seq_length": 32}


Given = Callable[[Path], dict[str, Any]]
MADE: list[tuple[Any, Given, Callable[[Any], None]]] = [
    (GPTDataset, lambda folder: {"data_prefix": corpus(folder), "max_seq_length": 6}, first_batch),
    *((kind, of_sentences, first_batch) for kind in (BertDataset, RobertaDataset, T5Dataset)),
    (PackedDataset, lambda _: {"dataset": [{"x": np.arange(3)}] * 8, "length": 8}, first_batch),
    (FilteredDataset, lambda _: {"dataset": DATASET, "keep": bool}, first_batch),
    (OneRound, lambda _: {"transform": FilteredDataset(DATASET, bool)}, first_batch),
    (BlendedDataset, lambda _: {"datasets": [DATASET, DATASET], "weights": [1, 2]}, first_batch),
    (ConcatDataset, lambda _: {"datasets": [DATASET]}, first_batch),
    (Subset, lambda _: {"dataset": DATASET, "start": 0, "stop": 10}, first_batch),
    (random_split, lambda _: {"dataset": DATASET, "fractions": [0.5, 0.5]}, lambda parts: first_batch(parts[0])),
    (RandomPart, lambda _: {"dataset": DATASET, "seed": 1, "start": 0, "stop": 10}, first_batch),
    (Map, lambda _: {"dataset": DATASET, "function": lambda sample: sample}, first_batch),
    (RandomMap, lambda _: {"dataset": DATASET, "function": lambda sample, generator: sample}, first_batch),
    (LabelledImages, lambda _: {"source": Pictures()}, first_batch),
    (transforms.Compose, lambda _: {"transforms": [transforms.ImageToFloat()]}, through),
    (transforms.ImageToFloat, lambda _: {}, through),
    (transforms.RandomErasing, lambda _: {}, lambda transform: through(transforms.ImageToFloat(), transform)),
    *((kind, lambda _: {"size": 16}, on_pixels) for kind in (transforms.Resize, transforms.RandomResizedCrop)),
    (transforms.CenterCrop, lambda _: {"size": 16}, on_pixels),
    *((kind, lambda _: {}, on_pixels) for kind in (transforms.RandomFlip, transforms.ColorJitter)),
    (transforms.RandAugment, lambda _: {}, on_pixels),
    (transforms.Mixup, lambda _: {"num_classes": 8}, mixed),
    (transforms.FillInTheMiddle, lambda _: {"prefix_id": 1, "middle_id": 2, "suffix_id": 3}, in_the_middle),
    (transforms.Seeded, lambda _: {"transform": np.asarray}, on_pixels),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("make", "given", "use"), [pytest.param(*each, id=each[0].__name__) for each in MADE])
def test_an_odd_argument_works_or_is_refused(
    make: Any, given: Given, use: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = given(tmp_path)
    use(make(**arguments))
    for name in inspect.signature(make).parameters:
        for value in ODD:
            try:
                use(make(**{**arguments, name: value}))
            except DataPipelineError:
                continue
            except Exception as error:
                raise AssertionError(f"{make.__name__}({name}={value!r}) raises {error!r}") from error


@pytest.mark.parametrize(
    "make",
    [
        lambda prefix: GPTDataset(prefix, NUMPY.int64(6), NUMPY.int32(2), True, NUMPY.int64(3)),
        lambda prefix: BertDataset(
            "a", Tokenizer(), None, prefix, NUMPY.int64(9), NUMPY.float32(0.2), 32, NUMPY.float32(1)
        ),
        lambda prefix: T5Dataset(
            "a", Tokenizer(), None, prefix, None, NUMPY.float32(0.2), NUMPY.int64(32), NUMPY.int64(32)
        ),
        lambda prefix: Subset(DATASET, NUMPY.int64(2), NUMPY.int64(8)),
        lambda prefix: random_split(DATASET, [1, 1], NUMPY.int64(3))[0],
        lambda prefix: RandomPart(DATASET, NUMPY.uint64(3), NUMPY.int64(1), NUMPY.int64(8)),
        lambda prefix: OneRound(FilteredDataset(DATASET, bool), NUMPY.int64(3)),
    ],
)
def test_numbers_of_numpy_are_those_of_python_also_in_a_state(make: Any, tmp_path: Path) -> None:
    dataset = make(corpus(tmp_path))
    sampler = CyclicSampler(
        dataset, NUMPY.int64(2), seed=NUMPY.int64(4), weights=[1] * len(dataset), num_samples=NUMPY.int64(5)
    )
    loader = DataLoader(dataset, sampler)
    next(iter(loader))
    json.dumps(loader.state_dict())


def test_numbers_of_numpy_choose_the_stream_of_random_numbers() -> None:
    with reading_samples(((1, 2, 3),)):
        expected = sample_generator(4).random()
        assert sample_generator(NUMPY.int64(4)).random() == expected
    with reading_samples(((NUMPY.int64(1), NUMPY.int32(2), NUMPY.uint64(3)),)):
        assert sample_generator(4).random() == expected
