from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Callable

import numpy as np
import oneflow as flow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

import libai_data
from libai_data.config import LazyCall, check_targets, instantiate
from libai_data.data.datasets import ConcatDataset
from libai_data.data.samplers import CyclicSampler, SingleRoundSampler
from libai_data.delivery import build, to_global
from libai_data.delivery.build import (
    build_image_test_loader,
    build_image_train_loader,
    build_nlp_test_loader,
    build_nlp_train_loader,
    build_nlp_train_val_test_loader,
    cut,
)
from libai_data.errors import ConfigError, SchemaError
from libai_data.mesh import ParallelMesh, get_mesh, set_mesh
from libai_data.structures import DistTensorData, Instance, batch_info
from tests.properties import examples

TRAIN_BUILDERS = [build_nlp_train_loader, build_image_train_loader]
TEST_BUILDERS = [build_nlp_test_loader, build_image_test_loader]


class Numbers:
    """Samples that tell their index; `offset` tells datasets apart."""

    def __init__(self, size: int, offset: int = 0) -> None:
        self.size = size
        self.offset = offset

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Instance:
        return Instance(
            tokens=DistTensorData(np.full((5,), index + self.offset)),
            labels=DistTensorData(index + self.offset, placement_idx=-1),
        )


@pytest.fixture()
def rank_1_of_2x1() -> Iterator[None]:
    before = get_mesh()
    set_mesh(ParallelMesh(2, 1, 1, rank=1))
    yield
    set_mesh(before)


@pytest.fixture()
def tensor_parallel() -> Iterator[None]:
    before = get_mesh()
    set_mesh(ParallelMesh(1, 2, 1))
    yield
    set_mesh(before)


@dataclass
class Point:
    x: int


@dataclass
class Points:
    size: int = 6

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return {"x": index}


@pytest.mark.parametrize(
    "make",
    [
        lambda number: number,
        lambda number: f"text {number}",
        lambda number: np.full(3, number),
        lambda number: flow.full((3,), number),
        lambda number: [number, 2 * number],
        lambda number: [flow.full((3,), number)],
        lambda number: (number,),
        lambda number: {"x": number},
        lambda number: Instance(x=number),
        Point,
    ],
    ids=["int", "str", "array", "tensor", "list", "list of tensors", "tuple", "dict", "Instance", "dataclass"],
)
def test_a_list_of_samples_of_any_form_is_a_dataset(make: Callable[[int], Any]) -> None:
    samples = [make(number) for number in range(6)]

    def plain(batch: Any) -> Any:
        return batch["x"] if isinstance(batch["x"], list) else batch["x"].numpy().tolist()

    expected = [plain(batch) for batch in libai_data.DataLoader(samples, 2, fields=["x"])]
    for builder in TEST_BUILDERS:
        loader = builder(samples, 2, num_workers=0, fields=["x"], sampler=LazyCall(SingleRoundSampler)(shuffle=False))
        assert [plain(batch) for batch in loader] == expected


@pytest.mark.parametrize("datasets", [[[{"x": 1}, {"x": 2}], [{"x": 3}]], [Points(2), Points(1)], [range(2), [(2,)]]])
def test_a_list_of_datasets_is_several(datasets: Any) -> None:
    loader = build_nlp_test_loader(datasets, 1, num_workers=0, fields=["x"])
    assert len(list(loader)) == 3


def labels_of(loader: Any, batches: int = 10**6) -> list[int]:
    return [int(label) for batch in islice(loader, batches) for label in batch.labels.tensor.numpy()]


@pytest.mark.parametrize("builder", TRAIN_BUILDERS)
def test_a_training_loader_is_an_endless_seeded_stream_from_the_consumed_samples_on(
    builder: Callable[..., Any],
) -> None:
    loader, validation, test = builder(Numbers(10), 4, seed=3, num_workers=0)
    assert (validation, test) == (None, None)
    assert loader.global_batch_size == 4
    labels = labels_of(loader, 5)
    assert sorted(labels[:10]) == sorted(labels[10:]) == list(range(10))
    again, _, _ = builder(Numbers(10), 4, seed=3, num_workers=0)
    other, _, _ = builder(Numbers(10), 4, seed=4, num_workers=0)
    rest, _, _ = builder(Numbers(10), 4, seed=3, consumed_samples=8, num_workers=0)
    assert labels_of(again, 5) == labels
    assert labels_of(other, 5) != labels
    assert labels_of(rest, 3) == labels[8:]


@pytest.mark.parametrize("builder", TEST_BUILDERS)
def test_a_test_loader_is_one_round_in_which_each_sample_counts_once(builder: Callable[..., Any]) -> None:
    loader = builder(Numbers(10), 4, num_workers=0)
    for _ in range(2):
        counted: list[int] = []
        for batch in loader:
            info = batch_info(batch)
            assert info is not None
            counted += batch.labels.tensor.numpy().tolist()[: info.valid]
        assert sorted(counted) == list(range(10))
    assert len(loader) == 3


def test_only_image_test_loaders_shuffle_by_default_as_libais_do() -> None:
    assert labels_of(build_nlp_test_loader(Numbers(8), 4, num_workers=0)) == list(range(8))
    assert labels_of(build_image_test_loader(Numbers(8), 4, num_workers=0)) != list(range(8))


@pytest.mark.parametrize(
    "builder", [*TRAIN_BUILDERS, *TEST_BUILDERS, build_nlp_train_val_test_loader], ids=lambda builder: builder.__name__
)
def test_options_of_the_loader_are_checked_before_anything_is_built(builder: Callable[..., Any]) -> None:
    def check_options(**options: Any) -> None:
        call = LazyCall(builder)(dataset=[LazyCall(Numbers)(size=8)], **options)
        check_targets(DictConfig({"dataloader": {"train": call}}, flags={"allow_objects": True}))

    check_options(prefetch=8, on_error="skip", readers="node")
    with pytest.raises(ConfigError, match=r"^dataloader\.train\.prefech: .* no argument .* Did you mean 'prefetch'"):
        check_options(prefech=8)
    with pytest.raises(ConfigError, match=r"^dataloader\.train\.prefetch is 'eight'; it must be an int"):
        check_options(prefetch="eight")


@pytest.mark.parametrize("builder", [*TRAIN_BUILDERS, *TEST_BUILDERS, build_nlp_train_val_test_loader])
def test_the_signature_begins_as_libais(builder: Callable[..., Any]) -> None:
    libais = {
        "build_nlp_train_loader": "dataset train_batch_size test_batch_size sampler num_workers consumed_samples seed "
        "collate_fn dataset_mixer",
        "build_nlp_test_loader": "dataset test_batch_size sampler num_workers seed collate_fn",
        "build_image_test_loader": "dataset test_batch_size sampler num_workers seed collate_fn",
        "build_nlp_train_val_test_loader": "dataset splits weights train_val_test_num_samples train_batch_size "
        "test_batch_size train_sampler test_sampler num_workers consumed_samples seed collate_fn dataset_mixer",
    }[builder.__name__.replace("build_image_train", "build_nlp_train")].split()
    parameters = inspect.signature(builder).parameters
    assert list(parameters)[: len(libais)] == libais
    assert parameters["num_workers"].default == 4
    assert "mixup_func" in inspect.signature(build_image_train_loader).parameters


def test_a_rank_reads_its_own_part_of_each_global_batch(rank_1_of_2x1: None) -> None:
    loader, _, _ = build_nlp_train_loader(Numbers(12), 3, num_workers=0)
    assert loader.global_batch_size == 6
    set_mesh(ParallelMesh(1, 1, 1))
    whole, _, _ = build_nlp_train_loader(Numbers(12), 6, num_workers=0)
    batches = [labels_of(whole, 1) for _ in range(2)]
    assert labels_of(loader, 2) == batches[0][3:] + batches[1][3:]


class Swapping:
    def __call__(self, images: Any, labels: Any) -> Any:
        return labels, images


def test_configs_of_datasets_samplers_collators_and_mixup_are_built() -> None:
    loader, _, _ = build_image_train_loader(
        [LazyCall(Numbers)(size=4), LazyCall(Numbers)(size=4, offset=100)],
        4,
        sampler=LazyCall(CyclicSampler)(shuffle=False),
        mixup_func=LazyCall(Swapping)(),
        collate_fn=Instance.stack,
        num_workers=0,
    )
    assert labels_of(loader, 2) == [0, 1, 2, 3, 100, 101, 102, 103]
    assert isinstance(loader.dataset, ConcatDataset)
    assert isinstance(loader.mixup_func, Swapping)


def test_a_dataset_mixer_of_the_users_own_mixes() -> None:
    loader, _, _ = build_nlp_train_loader(
        [Numbers(4), Numbers(9, offset=100)],
        4,
        sampler=LazyCall(CyclicSampler)(),
        dataset_mixer=lambda datasets: datasets[1],
        num_workers=0,
    )
    assert labels_of(loader, 1) == [100, 101, 102, 103]


def test_building_leaves_the_samplers_config_as_it_was() -> None:
    # LiBai writes dataset, rank and seed into its default argument, which all loaders share.
    sampler = LazyCall(CyclicSampler)(shuffle=True)
    build_nlp_train_loader(Numbers(8), 2, sampler=sampler, num_workers=0)
    assert set(sampler) == {"_target_", "shuffle"}
    assert set(build._ENDLESS) == {"_target_", "shuffle"}


@given(
    st.integers(0, 300),
    st.lists(st.one_of(st.integers(0, 1000), st.floats(0, 1000)), min_size=1, max_size=3).filter(lambda s: sum(s) > 0),
)
def test_a_split_covers_the_dataset_in_three_parts_of_its_proportions(size: int, split: list[float]) -> None:
    parts = cut(range(size), split)
    assert [sample for part in parts for sample in (part[index] for index in range(len(part)))] == list(range(size))
    assert len(parts) == 3
    for part, proportion in zip(parts, [*split, 0, 0]):
        assert abs(len(part) - size * proportion / sum(split)) <= 1
        assert proportion > 0 or len(part) == 0


@settings(max_examples=examples(20))
@given(st.integers(10, 60), st.integers(10, 60))
def test_train_validation_and_test_loaders_share_out_all_samples(first: int, second: int) -> None:
    loaders = build_nlp_train_val_test_loader(
        [Numbers(first), Numbers(second, offset=1000)],
        splits=[[7, 2, 1], [1, 1, 2]],
        weights=None,
        train_val_test_num_samples=None,
        train_batch_size=1,
        test_batch_size=1,
        num_workers=0,
    )
    parts = [labels_of(loader, len(loader)) for loader in loaders if loader is not None]
    assert len(parts) == 3
    assert sorted(sum(parts, [])) == [*range(first), *range(1000, 1000 + second)]  # noqa: RUF017


THREE_PARTS: dict[str, Any] = {
    "dataset": Numbers(10),
    "splits": [[7, 2, 1]],
    "weights": None,
    "train_val_test_num_samples": None,
    "train_batch_size": 2,
    "test_batch_size": 2,
    "num_workers": 0,
}


def test_a_part_that_nothing_is_left_for_is_no_loader() -> None:
    train, validation, test = build_nlp_train_val_test_loader(**{**THREE_PARTS, "splits": [[9, 0, 1]]})
    assert validation is None
    assert (len(train), len(test)) == (5, 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leave no sample for training"):
        build_nlp_train_val_test_loader(**{**THREE_PARTS, "splits": [[0, 1, 1]]})


@settings(max_examples=examples(20))
@given(st.lists(st.integers(1, 9), min_size=3, max_size=3), st.integers(0, 40))
def test_weights_hold_at_every_prefix_of_the_training_stream_and_go_on_after_a_resume(
    weights: list[int], consumed: int
) -> None:
    def training(**arguments: Any) -> Any:
        loader, validation, _ = build_nlp_train_val_test_loader(
            [Numbers(40, offset=1000 * number) for number in range(3)],
            [[9, 1], [9, 1], [1, 0]],
            weights,
            None,
            train_batch_size=1,
            test_batch_size=1,
            num_workers=0,
            **arguments,
        )
        # Of the other parts each sample is taken once.
        assert len(labels_of(validation, len(validation))) == 8  # type: ignore[arg-type]
        return loader

    stream = labels_of(training(), 200)
    for number, weight in enumerate(weights):
        taken = np.cumsum([label // 1000 == number for label in stream])
        assert (abs(taken - np.arange(1, 201) * weight / sum(weights)) < 1).all()
        assert max(label % 1000 for label in stream if label // 1000 == number) < (40 if number == 2 else 36)
    assert labels_of(training(consumed_samples=consumed), 20) == stream[consumed : consumed + 20]


TWO: dict[str, Any] = {"dataset": [Numbers(9), Numbers(9)], "splits": [[1], [1]]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"splits": [[7, 2, 1], [7, 2, 1]]}, "splits has 2 entries for 1 datasets"),
        ({"weights": [1.0, 1.0]}, "weights has 2 entries for 1 datasets"),
        ({"splits": [[1, 2, 3, 4]]}, r"split is \[1, 2, 3, 4\]"),
        ({"splits": [[-1, 2]]}, r"split is \[-1, 2\]"),
        ({"splits": [[0, 0, 0]]}, r"split is \[0, 0, 0\]"),
        ({"splits": [[]]}, r"split is \[\]"),
        ({"splits": [["most", 1]]}, r"split is \['most', 1\]"),
        ({"splits": None}, r"splits are \[\], which leave no sample for training"),
        ({"splits": [[float("nan"), 1]]}, r"split is \[nan, 1\]"),
        ({"splits": [None]}, r"splits is \[None\]"),
        ({"splits": [[98, 1, 1]]}, r"splits are \[\[98, 1, 1\]\], which leave no sample for validation"),
        ({**TWO, "weights": [1, -2]}, r"weights of a blend are \[1, -2\]"),
        ({**TWO, "weights": [1, 2], "dataset_mixer": list}, r"weights are \[1, 2\], and there is also a dataset_mixer"),
        ({"train_batch_size": 0}, "train_batch_size is 0"),
        ({"test_batch_size": None}, "test_batch_size is None"),
    ],
)
def test_malformed_splits_and_weights_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_nlp_train_val_test_loader(**{**THREE_PARTS, "weights": [1.0], **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": LazyCall(Numbers)(size=0)}, "the dataset is empty"),
        ({"dataset": []}, "dataset is an empty list"),
        ({"train_batch_size": 0}, "train_batch_size is 0"),
        ({"train_batch_size": "4"}, "train_batch_size is '4'"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"consumed_samples": -1}, "consumed_samples is"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"prefetc": 3}, r"libai_data\.{builder} has no argument 'prefetc'.*Did you mean 'prefetch'"),
        ({"readers": "nodes"}, "readers is 'nodes'.*Did you mean 'node'"),
    ],
)
@pytest.mark.parametrize("builder", TRAIN_BUILDERS)
def test_what_cannot_be_built_is_refused_by_the_configs_key(
    builder: Callable[..., Any], arguments: dict[str, Any], message: str
) -> None:
    usual = {"dataset": LazyCall(Numbers)(size=9), "train_batch_size": 4, "num_workers": 0}
    call = LazyCall(builder)(**{**usual, **arguments})
    cfg = DictConfig({"dataloader": {"train": call}}, flags={"allow_objects": True})
    message = message.replace("{builder}", builder.__name__)
    with pytest.raises(ConfigError, match=rf"dataloader\.train.*{message}"):
        instantiate(cfg.dataloader.train, _recursive_=False)


@pytest.mark.parametrize("builder", TEST_BUILDERS)
def test_a_test_dataset_smaller_than_a_batch_is_filled_up_and_an_empty_one_refused(builder: Callable[..., Any]) -> None:
    [batch] = builder(Numbers(3), 8, num_workers=0)
    assert batch_info(batch).valid == 3  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="the dataset is empty"):
        builder(Numbers(0), 4, num_workers=0)


def test_layouts_set_by_field_name_win_over_the_datasets() -> None:
    loader, _, _ = build_nlp_train_loader(
        Numbers(8),
        4,
        layouts={"tokens": {"sbp_list": ["split_0", "split_1"]}, "labels": {"placement_idx": 0}},
        num_workers=0,
    )
    batch = next(iter(loader))
    assert (batch.tokens.sbp_list, batch.tokens.placement_idx) == (["split_0", "split_1"], 0)
    assert (batch.labels.sbp_list, batch.labels.placement_idx) == (["split_0", "broadcast"], 0)


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"token": {"placement_idx": 0}}, r"layouts\.token.*'tokens', 'labels'.*Did you mean 'tokens'"),
        ({"tokens": {"placement": 0}}, r"layouts\.tokens .*'placement'.*Did you mean 'placement_idx'"),
        ({"tokens": {"sbp_list": ["split_0"]}}, r"layouts\.tokens.*one entry for each of the axes"),
        ({"tokens": {"sbp_list": ["split_0", "broadcast", "broadcast"]}}, r"layouts\.tokens.*one entry for each"),
        ({"tokens": {"sbp_list": ["split_0", "splt_1"]}}, r"layouts\.tokens.*'splt_1' for the tensor axis"),
    ],
)
def test_a_layout_of_an_unknown_field_key_or_axis_is_refused(layouts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loader, _, _ = build_nlp_train_loader(Numbers(8), 4, layouts=layouts, num_workers=0)
        next(iter(loader))


def test_a_dim_that_does_not_divide_is_refused_by_field(tensor_parallel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, _, _ = build_nlp_train_loader(
        Numbers(8), 4, layouts={"tokens": {"sbp_list": ["split_0", "split_1"]}}, num_workers=0
    )
    with pytest.raises(SchemaError, match=r"field 'tokens'.*dim .* 5 .*into 2 parts .*tensor axis"):
        to_global_alone(next(iter(loader)), monkeypatch)


def to_global_alone(batch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`to_global` as if the other ranks agreed."""
    fields = dict(batch.get_fields())
    monkeypatch.setattr("libai_data.delivery.contract.gather_words", lambda words: words[None])
    return to_global(fields)


def test_a_sampler_of_another_kind_of_round_can_be_chosen() -> None:
    loader = build_nlp_test_loader(
        Numbers(8), 3, sampler=LazyCall(SingleRoundSampler)(shuffle=True, drop_last=True), num_workers=0
    )
    assert len(labels_of(loader)) == 6


CALLED: list[str] = []


def note_call(word: str) -> None:
    CALLED.append(word)


class Unread(dict[str, Any]):
    """A sample that is not to be searched when its loader is made."""

    def values(self) -> Any:
        raise AssertionError("the values of a sample were read")


@pytest.mark.parametrize("kind", [dict, Unread])
@pytest.mark.parametrize(
    "make",
    [
        lambda samples: libai_data.DataLoader(samples, 2),
        lambda samples: libai_data.from_iterable(samples, 2),
        lambda samples: libai_data.from_iterable([samples], batches=True),
        lambda samples: build_nlp_train_loader(samples, train_batch_size=2, num_workers=0)[0],
        lambda samples: build_nlp_train_loader([samples, samples], train_batch_size=2, num_workers=0)[0],
        lambda samples: build_nlp_test_loader(samples, test_batch_size=2, num_workers=0),
    ],
)
def test_what_samples_in_a_list_contain_is_neither_called_nor_searched(make: Any, kind: Any) -> None:
    call = {"_target_": f"{__name__}.note_call", "word": "called"}
    for sample in (kind(call), kind(nested=[call])):
        make([sample] * 2)
    assert not CALLED


def test_lazy_calls_of_datasets_in_a_list_are_called() -> None:
    datasets = [LazyCall(Numbers)(size=2, offset=offset) for offset in (0, 10)]
    loader, _, _ = build_nlp_train_loader([*datasets, Numbers(1, 20)], train_batch_size=5, num_workers=0)
    assert sorted(next(iter(loader.numpy()))["labels"].tolist()) == [0, 1, 10, 11, 20]
