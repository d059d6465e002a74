from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data import DataLoader
from libai_data.data.random.sample_random import BatchRandom
from libai_data.data.samplers import CyclicSampler
from libai_data.data.samplers.schedule import StepSchedule
from libai_data.data.transforms import BatchTransform, Mixup
from libai_data.data.transforms.mixup import SoftLabels
from libai_data.delivery.build import build_image_train_loader
from libai_data.errors import ConfigError, DataPipelineError, SchemaError
from libai_data.loader import trivial_batch_collator
from tests.data.transforms.mixed_images import CLASSES, FetchedImages, FilledImages, Images, image_of
from tests.loader.streams import WORKER_NAMES, WORKERS, loading
from tests.properties import slowly

BOTH: dict[str, Any] = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "num_classes": CLASSES}


def mixed(
    dataset: Any, transform: BatchTransform, ranks: int = 1, batch: int = 8, steps: int = 6, **arguments: Any
) -> list[dict[str, np.ndarray]]:
    """The first global batches, put together of what each data-parallel rank reads."""
    shards = []
    for rank in range(ranks):
        sampler = CyclicSampler(dataset, batch // ranks, data_parallel_rank=rank, data_parallel_size=ranks)
        with loading(dataset, sampler, mixup_func=transform, seed=3, **arguments) as loader:
            assert loader.mixup_func is None, "the trainer is not to mix again"
            batches = islice(iter(loader.numpy()), steps)
            shards.append([{name: value.copy() for name, value in batch.items()} for batch in batches])
    return [{name: np.concatenate([part[name] for part in parts]) for name in parts[0]} for parts in zip(*shards)]


def equal(found: list[dict[str, np.ndarray]], expected: list[dict[str, np.ndarray]]) -> bool:
    return len(found) == len(expected) and all(
        one[name].tobytes() == other[name].tobytes() for one, other in zip(found, expected) for name in other
    )


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("form", ["float32", "uint8"])
def test_the_global_batch_is_the_same_on_any_number_of_ranks(mode: str, form: str) -> None:
    transform = Mixup(mode=mode, **BOTH)
    expected = mixed(Images(form), transform)
    assert not equal(expected, mixed(Images(form), Mixup(mode=mode, prob=0.0, **BOTH)))
    for ranks in (2, 4):
        assert equal(mixed(Images(form), transform, ranks), expected)


class Labelled(NamedTuple):
    images: Any
    labels: Any


def test_samples_of_any_form_with_names_are_mixed() -> None:
    dicts = [{"images": np.full((1, 4, 4), number, np.float32), "labels": number % CLASSES} for number in range(8)]
    transform = Mixup(**BOTH)
    assert equal(mixed([Labelled(**each) for each in dicts], transform), mixed(dicts, transform))


@pytest.mark.parametrize("workers", [*WORKERS[1:3], slowly(WORKERS[3])], ids=WORKER_NAMES[1:])
def test_the_global_batch_is_the_same_whoever_reads_it_and_how(workers: dict[str, Any]) -> None:
    transform = Mixup(mode="elem", **BOTH)
    expected = mixed(Images(), transform)
    assert equal(mixed(Images(), transform, **workers), expected)
    assert equal(mixed(FilledImages(), transform, ranks=2, **workers), expected)


def test_the_global_batch_is_the_same_read_together_or_collated() -> None:
    transform = Mixup(mode="batch", **BOTH)
    expected = mixed(Images(), transform)
    assert equal(mixed(FilledImages(), transform), expected)
    assert equal(mixed(FetchedImages(), transform), expected)
    assert equal(mixed(Images(), transform, collate_fn=lambda samples: trivial_batch_collator(samples)), expected)


def test_it_goes_on_where_a_state_was_saved() -> None:
    transform = Mixup(mode="batch", **BOTH)
    expected = mixed(Images(), transform)
    loader = DataLoader(Images(), CyclicSampler(Images(), 8), mixup_func=transform, seed=3)
    state = [loader.state_dict() for _ in islice(iter(loader), 3)][-1]
    resumed = DataLoader(Images(), CyclicSampler(Images(), 8), batch_transform=transform, seed=3)
    resumed.load_state_dict(state)
    batch = next(iter(resumed))
    assert batch.images.tensor.numpy().tobytes() == expected[3]["images"].tobytes()


def test_it_draws_anew_in_each_epoch_and_for_each_seed() -> None:
    transform = Mixup(cutmix_alpha=0.0, mode="pair", num_classes=CLASSES, label_smoothing=0.0)
    batches = mixed(Images(), transform, batch=40, steps=2)
    shares = [np.sort(batch["labels"].max(axis=1)) for batch in batches]
    assert not np.array_equal(shares[0], shares[1])


@given(
    mode=st.sampled_from(["batch", "pair", "elem"]),
    alpha=st.sampled_from([0.2, 1.0, 4.0]),
    pairs=st.integers(1, 4),
    position=st.integers(0, 1 << 40),
    smoothing=st.sampled_from([0.0, 0.1]),
)
def test_cutmix_takes_each_pixel_of_one_of_the_two_and_labels_in_the_same_shares(
    mode: str, alpha: float, pairs: int, position: int, smoothing: float
) -> None:
    transform = Mixup(0.0, alpha, mode=mode, label_smoothing=smoothing, num_classes=CLASSES)
    rows = 2 * pairs
    before = np.stack([image_of(row, "float32") for row in range(rows)])
    labels = np.stack([transform.prepared(Images())[row].labels.tensor for row in range(rows)])
    fields = {"images": before.copy(), "labels": labels.copy()}
    transform(fields, BatchRandom(1, position, np.zeros(rows, np.int64), np.arange(rows)))
    for row in range(rows):
        own = fields["images"][row] == before[row]
        np.testing.assert_array_equal(fields["images"][row][~own], before[row ^ 1][~own])
        share = np.float32(own.mean())
        np.testing.assert_allclose(
            fields["labels"][row], labels[row] * share + labels[row ^ 1] * (1 - share), atol=1e-6
        )
    np.testing.assert_allclose(fields["labels"].sum(axis=1), 1, atol=1e-5)


@given(mode=st.sampled_from(["batch", "pair", "elem"]), form=st.sampled_from(["float32", "uint8"]))
def test_mixup_blends_images_and_labels_in_the_same_shares(mode: str, form: str) -> None:
    transform = Mixup(mode=mode, label_smoothing=0.0, num_classes=4)
    before = np.stack([image_of(row, form) for row in range(4)])
    fields = {"images": before.copy(), "labels": np.eye(4, dtype=np.float32)}
    transform(fields, BatchRandom(1, 0, np.zeros(4, np.int64), np.arange(4)))
    for row in range(4):
        share = fields["labels"][row, row]
        assert fields["labels"][row, row ^ 1] == pytest.approx(1 - share, abs=1e-6)
        expected = before[row] * share + before[row ^ 1] * (1 - share)
        np.testing.assert_allclose(fields["images"][row], expected, atol=0.51 if form == "uint8" else 1e-4)
    shares = np.diag(fields["labels"])
    assert len(np.unique(shares)) == {"batch": 1, "pair": 2, "elem": 4}[mode]


@pytest.mark.parametrize("form", ["float32", "uint8"])
def test_images_in_another_order_of_memory_are_mixed_too(form: str) -> None:
    images = np.stack([image_of(index, form) for index in range(4)])
    labels = np.eye(4, dtype=np.float32)
    found = [{"images": each, "labels": labels.copy()} for each in (images.copy(), np.asfortranarray(images))]
    for fields in found:
        Mixup(num_classes=4)(fields, BatchRandom(0, 0, np.zeros(4, int), np.arange(4)))
    assert equal(found[1:], found[:1]) and not np.array_equal(found[1]["images"], images)


def test_labels_are_those_of_flowvision() -> None:
    import oneflow as flow
    from flowvision.data.mixup import mixup_target

    ours = np.stack([SoftLabels(Images(), 10, 0.1)[index].labels.tensor for index in (3, 5)])
    theirs = mixup_target(flow.tensor([3, 5]), 10, 0.3, 0.1, device="cpu").numpy()
    np.testing.assert_allclose(ours * np.float32(0.3) + ours[::-1] * np.float32(0.7), theirs, atol=1e-6)


def test_minmax_bounds_the_box() -> None:
    transform = Mixup(0.0, cutmix_minmax=[0.2, 0.5], mode="elem", label_smoothing=0.0, num_classes=CLASSES)
    for batch in mixed(Images(), transform):
        # Boxes of 1 to 3 of 6 rows and 1 to 2 of 5 columns.
        cut = 1 - batch["labels"].max(axis=1)
        assert (cut <= 6 / 30 + 1e-6).all() and (cut >= 1 / 30 - 1e-6).all()


def test_with_a_probability_of_half_about_half_of_the_pairs_are_mixed() -> None:
    transform = Mixup(prob=0.5, mode="pair", label_smoothing=0.0, num_classes=40)
    batches = mixed(Images(), transform, batch=40, steps=10)
    unmixed = sum(int((batch["images"] * 128 % 1 == 0).all(axis=(1, 2, 3)).sum()) for batch in batches)
    assert 120 < unmixed < 280


def test_a_worker_that_dies_changes_nothing(tmp_path: Path) -> None:
    transform = Mixup(mode="elem", **BOTH)
    killer = tmp_path / "killer"
    killer.touch()
    found = mixed(Images(kills=killer), transform, num_workers=2)
    assert not killer.exists()
    assert equal(found, mixed(Images(), transform))


def test_skipped_samples_are_replaced_before_rows_are_mixed() -> None:
    transform = Mixup(mode="elem", **BOTH)
    expected = mixed(Images(fails=7), transform, on_error="skip")
    assert equal(mixed(FilledImages(fails=7), transform, ranks=2, on_error="skip", num_workers=2), expected)


def test_an_odd_number_of_rows_on_a_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 rows on each data-parallel rank.*needs multiples of 2"):
        build_image_train_loader(Images(), 3, mixup_func=Mixup(**BOTH))
    loader = build_image_train_loader(Images(), 4, mixup_func=Mixup(**BOTH), num_workers=0)[0]
    loader.follow(StepSchedule(((0, 4), (1, 5))))
    batches = iter(loader)
    next(batches)
    with pytest.raises(ConfigError, match="batch 1 has 5 rows"):
        next(batches)


def test_what_cannot_be_mixed_is_refused_with_what_it_is() -> None:
    with pytest.raises(DataPipelineError, match="field 'labels' is 3; with num_classes 3 it can be 0 to 2"):
        mixed(Images(), Mixup(num_classes=3))

    cases: list[tuple[dict[str, Any], str]] = [
        ({"labels": 1}, "samples need a field 'images'"),
        ({"images": np.zeros((2, 2), np.float32), "labels": 1}, r"field 'images' is float32 \[2, 2\]"),
        ({"images": np.zeros((2, 2, 3), np.float64), "labels": 1}, r"field 'images' is float64 \[2, 2, 3\]"),
        ({"images": np.zeros((3, 8, 8), np.uint8), "labels": 1}, r"field 'images' is uint8 \[3, 8, 8\]; to be mixed"),
        ({"images": np.zeros((8, 8, 3), np.float32), "labels": 1}, r"field 'images' is float32 \[8, 8, 3\]; to be"),
        ({"images": image_of(0, "uint8")}, "samples need a field 'labels'"),
        ({"images": image_of(0, "uint8"), "labels": 0.5}, r"field 'labels' is float32 \[\]"),
    ]
    for fields, error in cases:
        with pytest.raises(DataPipelineError, match=error):
            mixed([fields] * 8, Mixup(num_classes=3))


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "pairs"},
        {"prob": 1.5},
        {"switch_prob": -0.1},
        {"mixup_alpha": 0.0},
        {"mixup_alpha": -1.0, "cutmix_alpha": 1.0},
        {"mixup_alpha": float("nan")},
        {"cutmix_alpha": float("inf")},
        {"cutmix_minmax": [0.5, 0.2]},
        {"label_smoothing": 1.0},
        {"num_classes": 0},
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        Mixup(**arguments)


class AddNoise(BatchTransform):
    """Adds one number to the whole batch, and one to each row."""

    def __call__(self, fields: dict[str, np.ndarray], random: BatchRandom) -> None:
        fields["images"] += np.float32(random.of_batch().random())
        for row, image in enumerate(fields["images"]):
            image += np.float32(random.of_row(row).random())


@pytest.mark.slow
def test_a_batch_transform_of_ones_own_is_the_same_on_every_layout() -> None:
    expected = mixed(Images(), AddNoise())
    assert not equal(expected, mixed(Images(), BatchTransformThatDoesNothing()))
    assert equal(mixed(Images(), AddNoise(), ranks=4), expected)
    assert equal(mixed(FilledImages(), AddNoise(), ranks=2, num_workers=2), expected)


class BatchTransformThatDoesNothing(BatchTransform):
    def __call__(self, fields: dict[str, np.ndarray], random: BatchRandom) -> None:
        pass


class Failing(BatchTransform):
    def __call__(self, fields: dict[str, np.ndarray], random: BatchRandom) -> None:
        raise ZeroDivisionError("no reason")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_transform_that_fails_is_named_with_its_samples(workers: int) -> None:
    with pytest.raises(DataPipelineError, match=r"(?s)Failing of samples \[.*ZeroDivisionError: no reason"):
        mixed(Images(), Failing(), num_workers=workers)


def test_two_batch_transforms_are_refused_and_schema_errors_name_the_field() -> None:
    with pytest.raises(ConfigError, match="batch_transform"):
        DataLoader(Images(), CyclicSampler(Images(), 4), mixup_func=AddNoise(), batch_transform=AddNoise())
    with pytest.raises(SchemaError, match="field 'labels'"):
        SoftLabels(Images(), 2)[5]
