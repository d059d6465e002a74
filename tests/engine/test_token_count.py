"""Real tokens are counted: padding is not, and a resumed training continues the count."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from libai_data import DataLoader, DataModule
from libai_data.config import LazyCall
from libai_data.data.datasets import BlendedDataset, ConcatDataset, PackedDataset
from libai_data.data.samplers import CyclicSampler
from libai_data.engine.token_count import TokenCounter, tokens_per_sample
from libai_data.loader import BatchLoader, PadCollator
from libai_data.structures import DistTensorData, Instance, batch_info
from tests.engine.data_runs import config_of, metric, train
from tests.engine.tiny import TinyDataset, TinyModel
from tests.properties import slowly


class Sentences(TinyDataset):
    """Points with 1 to 5 tokens each."""

    def __getitem__(self, index: int) -> Instance:
        sample = super().__getitem__(index)
        length = 1 + index % 5
        sample.set("input_ids", DistTensorData(np.full(length, index)))
        sample.set("attention_mask", DistTensorData(np.ones(length, np.int64)))
        return sample


class Reader(TinyModel):
    """Takes tokens, and looks at the points."""

    def forward(self, points: Any, labels: Any = None, input_ids: Any = None, attention_mask: Any = None) -> Any:
        return super().forward(points, labels)


def stopped_and_resumed(folder: Path, dataset: Any, sizes: dict[str, Any]) -> dict[int, list[int]]:
    """The samples of each step of a training that stops, and resumes."""

    def config() -> Any:
        cfg = config_of(folder, log_period=4, checkpointer={"period": 3}, **sizes)
        if dataset is None:
            cfg.dataloader.train.dataset._target_ = Sentences
        else:
            cfg.dataloader.train.dataset = dataset
        cfg.dataloader.train.collate_fn = LazyCall(PadCollator)(
            fields={"input_ids": {"value": 0}, "attention_mask": {"value": 0}}
        )
        cfg.model._target_ = Reader
        return cfg

    # After step 5: a checkpoint whose tokens no logging step has read.
    return {**train(config(), stop_after=6).steps, **train(config(), resume=True).steps}


@pytest.mark.parametrize("sizes", [{}, {"train_micro_batch_size": 2}])
def test_padding_is_not_counted_and_a_resume_continues_the_count(sizes: dict[str, Any], tmp_path: Path) -> None:
    steps = stopped_and_resumed(tmp_path, None, sizes)
    lengths = np.cumsum([sum(1 + index % 5 for index in steps[step]) for step in range(12)])
    assert metric(tmp_path, "consumed_tokens") == {step: lengths[step] for step in (3, 7, 11)}
    speed, time = metric(tmp_path, "tokens_per_second"), metric(tmp_path, "time")
    assert speed[11] == pytest.approx((lengths[11] - lengths[7]) / (4 * time[11]))
    assert f"tokens {lengths[11]}" in (tmp_path / "log.txt").read_text()


class Numbered(Sentences):
    """With a name, and an index that tells the corpus."""

    def __init__(self, length: int, name: str, first: int = 0, samples: int = 0) -> None:
        super().__init__(length)
        self.source, self._first, self._samples = SimpleNamespace(prefix=f"data/{name}"), first, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Instance:
        return super().__getitem__(self._first + index)


def joined(weights: Any) -> ConcatDataset:
    """60 and 40 samples, and their indices of 100."""
    parts = [Numbered(100, "web", 0, 60), Numbered(100, "books", 60, 40)]
    return ConcatDataset(parts) if weights is None else BlendedDataset(parts, weights, max_epochs=[None, 0.5])


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [
        ({"train_micro_batch_size": 2}, None),
        ({}, [3, 1]),
        slowly({}, None),
        slowly({"train_micro_batch_size": 2}, [3, 1]),
    ],
)
def test_tokens_of_each_of_several_datasets_are_counted_and_a_resume_continues(
    weights: Any, sizes: dict[str, Any], tmp_path: Path
) -> None:
    steps = stopped_and_resumed(tmp_path, LazyCall(joined)(weights=weights), sizes)
    indices = np.array([steps[step] for step in range(12)])
    tokens = np.cumsum((1 + indices % 5) * (indices >= 60), axis=0).sum(axis=1)
    assert metric(tmp_path, "consumed_tokens/books") == {step: tokens[step] for step in (3, 7, 11)}
    both = np.cumsum((1 + indices % 5).sum(axis=1))
    assert metric(tmp_path, "consumed_tokens/web") == {step: both[step] - tokens[step] for step in (3, 7, 11)}
    assert f"tokens {both[11]}  (web {both[11] - tokens[11]}, books {tokens[11]})" in (tmp_path / "log.txt").read_text()


class Masked(TinyDataset):
    """Sequences of 6 tokens, of which a mask shows 1 to 5 as real. The first ids tell the samples."""

    def __init__(self, name: str, first: int, has_mask: bool) -> None:
        super().__init__(15)
        self.source, self._first, self._has_mask = SimpleNamespace(prefix=name), first, has_mask

    def __getitem__(self, index: int) -> Any:
        number = self._first + index
        mask = {"attention_mask": (np.arange(6) <= number % 5).astype(np.int64)} if self._has_mask else {}
        return {"input_ids": np.full(6, number), **mask}


@pytest.mark.parametrize(
    ("ends", "lanes", "has_mask"),
    [("short", None, True), ("pad", None, True), ("pad", None, False), ("drop", None, True), ("cycle", 3, True)],
)
def test_tokens_of_each_dataset_are_counted_at_the_end_of_an_epoch_and_in_lanes(
    ends: str, lanes: int | None, has_mask: bool
) -> None:
    dataset = ConcatDataset([Masked("a", 0, has_mask), Masked("b", 15, has_mask)])
    loader = DataLoader(dataset, 4, shuffle=True, seed=1, ends=ends, lanes=lanes)
    counter, expected = TokenCounter(loader), [0, 0]
    counter.take(0, 0)
    for _ in range(3):
        for batch in islice(loader, 8):
            info = batch_info(batch)
            assert info is not None
            ids = batch["input_ids"].numpy()[: info.valid, 0]
            lengths = 1 + ids % 5 if has_mask else np.full(len(ids), 6)
            expected[0] += int(lengths[ids < 15].sum())
            expected[1] += int(lengths[ids >= 15].sum())
            counter.add(dict(batch.items()), [info])
        assert counter.take(0, 0)[0] == sum(expected)
        assert counter.sources == {"a": expected[0], "b": expected[1]}


class OneEpochEach(DataModule):
    def train_dataloader(self) -> Any:
        collate = PadCollator(fields={"input_ids": {"value": 0}, "attention_mask": {"value": 0}})
        return DataLoader(Sentences(21), 8, ends="pad", collate_fn=collate)


def test_a_training_counts_no_padding(tmp_path: Path) -> None:
    cfg = config_of(tmp_path, log_period=3, train_iter=6)
    del cfg["dataloader"]
    cfg.datamodule, cfg.model._target_ = LazyCall(OneEpochEach)(), Reader
    train(cfg)
    real = sum(1 + index % 5 for index in range(21))
    assert metric(tmp_path, "consumed_tokens") == {2: real, 5: 2 * real}


class Lengths:
    """Texts of given lengths."""

    def __init__(self, lengths: list[int], name: str) -> None:
        self.lengths, self.source = lengths, SimpleNamespace(prefix=name)
        self.shard_lengths = [len(lengths) // 2] * 2

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": np.arange(self.lengths[index])}


@pytest.mark.parametrize("known", [slowly(True), False])
@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("options", [{}, {"cut": False}, {"cut": False, "window": 0}, {"cut": False, "window": 3}])
def test_tokens_of_each_dataset_of_a_packed_blend_are_counted(
    options: dict[str, Any], lanes: int | None, known: bool
) -> None:
    lengths = [[3, 1, 4, 1, 5, 0, 2, 6], [5, 3, 5, 8]]
    parts = [Lengths(lengths[0], "a/same"), Lengths(lengths[1], "b/same")]
    packs = PackedDataset(
        BlendedDataset(parts, [2, 1]), 8, lengths=[*lengths[0], *lengths[1]] if known else None, **options
    )
    loader = BatchLoader(packs, CyclicSampler(packs, 2, shuffle=True, seed=1, lanes=lanes))
    counter = TokenCounter(loader)
    counter.take(0, 0)
    expected = [0, 0]
    batches = iter(loader)
    for step in range(1, 13):
        batch = next(batches)
        ids, segments = (field.tensor.numpy() for field in (batch.input_ids, batch.segment_ids))
        counter.add({"input_ids": flow.from_numpy(ids), "segment_ids": flow.from_numpy(segments)})
        expected[0] += int((segments > 0).sum())
        if step % 3 == 0:
            assert counter.take(0, 0)[0] == expected[0]
            assert sum(counter.sources.values()) == expected[0]
    assert list(counter.sources) == ["same#0", "same#1"]
    # In proportion to samples times mean lengths, 2 * 22 / 8 to 21 / 4.
    assert abs(counter.sources["same#0"] / expected[0] - 5.5 / 10.75) < 0.15
    loader.close()


@pytest.mark.parametrize(
    ("mask", "tokens"),
    [
        ({"attention_mask": [[True, True, False], [True, False, False]]}, 3),
        ({"segment_ids": [[1, 1, 2], [1, 2, 0]]}, 5),
        # Of a passage each token sees each; as a matrix, only the mask of an encoder is known to be so.
        ({"encoder_attn_mask": [np.outer(real, real) for real in ([1, 1, 0], [1, 0, 0])]}, 3),
        ({"attention_mask": np.tril(np.ones((2, 3, 3)))}, 6),
        # Of packed documents: two of one token, and one of two.
        ({"cu_seqlens": np.array([[0, 1, 2, 2], [0, 2, 2, 2]], np.int32)}, 4),
        # Pairs of answers.
        ({"chosen_segment_ids": [[1, 1, 0], [1, 0, 0]], "rejected_segment_ids": [[1, 0, 0], [1, 1, 1]]}, 7),
        ({}, 6),
    ],
)
def test_the_inputs_say_which_tokens_are_real(mask: dict[str, Any], tokens: int) -> None:
    counter = TokenCounter(SimpleNamespace(collates=False))
    for _ in range(2):
        names = {f"{name.rpartition('segment_ids')[0]}input_ids" for name in mask} or {"input_ids"}
        inputs = {
            **dict.fromkeys(names, np.zeros((2, 3), np.int64)),
            **{name: np.array(value) for name, value in mask.items()},
        }
        counter.add({name: flow.from_numpy(value) for name, value in inputs.items()})
    assert counter.take(4, 2) == (2 * tokens, tokens if counter.state_dict()["tokens"] == 0 else 2 * tokens)


def test_without_a_mask_tokens_are_those_of_the_field_that_is_called_so_unless_a_collator_may_pad() -> None:
    inputs = {"images": np.zeros((4, 3, 8)), "input_ids": np.zeros((4, 128))}
    assert tokens_per_sample(SimpleNamespace(collates=False), inputs) == 128
    assert tokens_per_sample(SimpleNamespace(collates=True), inputs) == 0
    assert tokens_per_sample(SimpleNamespace(collates=False), {"images": inputs["images"]}) == 0
    assert tokens_per_sample([], inputs) == 0
