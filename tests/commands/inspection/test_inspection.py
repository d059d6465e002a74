"""`libai-data inspect` shows what the ranks of a mesh would get: these samples, these stages, these words."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from libai_data import DataLoader, from_iterable
from libai_data.commands.inspect import main
from libai_data.commands.inspection import inspect_config, page_of
from libai_data.commands.inspection.step_rows import read_step, stages_of_sample
from libai_data.commands.one_rank import mesh_of, one_rank_loaders
from libai_data.config import LazyCall
from libai_data.data.datasets import ConcatDataset, FilteredDataset, ImageFolderDataset, random_split
from libai_data.data.random.sample_random import sample_generator
from libai_data.data.samplers import CyclicSampler, Order, SingleRoundSampler
from libai_data.data.samplers.single_round import ShortEndSampler
from libai_data.data.transforms import ImageToFloat
from libai_data.data.transforms.timing import transform_time
from libai_data.errors import ConfigError
from libai_data.loader import PadCollator
from libai_data.loader.failures import ErrorPolicy
from libai_data.loader.reading import SampleReader
from libai_data.loader.schema import array_of
from libai_data.structures import fields_of
from tests.commands.inspection.data import Compose, Planted, Sentences, Words, config_with
from tests.engine.data_runs import config_of, train
from tests.engine.tiny import TinyDataset


def indices(found: Any) -> list[int]:
    return [card.origin.index for card in found.cards]


def filtered(keep: str) -> FilteredDataset:
    """Points of which two thirds are kept."""
    dataset = TinyDataset(150)
    return FilteredDataset(dataset, dataset.labels > 0 if keep == "bools" else is_kept)


def is_kept(sample: Any) -> bool:
    return bool(sample.labels.tensor > 0)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(24):
        path = tmp_path / "pictures" / ("ab"[number % 2]) / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6, 5, 3), dtype=np.uint8)).save(path)
    return tmp_path / "pictures"


class Noise:
    """Adds noise that is drawn for the sample."""

    def __call__(self, value: np.ndarray) -> np.ndarray:
        noise = sample_generator().standard_normal(value.shape) + np.random.default_rng(np.random.randint(99)).random()
        return (value + noise).astype(np.float32)


def test_the_stages_of_a_transform_end_in_what_the_model_gets(pictures: Path) -> None:
    dataset = ConcatDataset(
        [ImageFolderDataset(pictures), ImageFolderDataset(pictures, Compose([ImageToFloat(), Noise()]))]
    )
    stages = stages_of_sample(dataset, 5, 2, 30)
    assert [name for name, _ in stages] == ["opened as RGB", "ImageToFloat", "Noise"]
    read = SampleReader(dataset, 5, ErrorPolicy("raise", None)).sample(2, 30)
    assert stages[-1][1].tobytes() == array_of(fields_of(read)["images"], "images").tobytes()
    assert isinstance(stages[0][1], Image.Image)


def test_the_stages_of_a_random_part_are_those_of_its_own_samples(pictures: Path) -> None:
    part, _ = random_split(ImageFolderDataset(pictures), [0.5, 0.5], seed=3)
    for index in range(len(part)):
        assert stages_of_sample(part, 0, 0, index)[-1][1].tobytes() == part[index].images.tensor.tobytes()


def test_each_stage_is_shown_and_named_for_each_sample(pictures: Path) -> None:
    dataset = LazyCall(ImageFolderDataset)(root=str(pictures), transform=Compose([ImageToFloat(), Noise()]))
    found = inspect_config(config_with(dataset), samples=4)
    assert found.findings == []
    for card in found.cards:
        captions = [re.sub(r" \d.*", "", caption[3:]) for caption, _ in card.pictures]
        assert captions == ["opened as RGB", "ImageToFloat", "Noise"]
    assert page_of(found).count("<img src='data:image/png;base64,") == 12


def test_the_time_of_a_transform_is_told_from_that_of_reading(pictures: Path) -> None:
    with transform_time():
        time.sleep(0.05)  # for nobody's loader
    dataset = LazyCall(ImageFolderDataset)(root=str(pictures), transform=Compose([ImageToFloat(), Noise()]))
    stats = inspect_config(config_with(dataset)).stats
    assert stats["transform_seconds"] > 0 and stats["source_seconds"] > 0


def test_a_step_shows_the_samples_that_made_it_up(tmp_path: Path) -> None:
    cfg = config_of(tmp_path, length=160)
    cfg.train.skip_steps = [[2, 3]]
    steps = train(cfg, stop_after=5).steps
    for step in (0, 4):
        assert indices(inspect_config(cfg, step=step)) == steps[step]
    later = inspect_config(cfg, step=6)
    assert ("step", "6: 8 samples, positions 48 to 55") in later.facts
    assert indices(later) == Order(160, 1234).locate(64 + np.arange(8))[1].tolist()


def test_each_row_is_given_to_the_rank_that_takes_it() -> None:
    cfg = config_with(LazyCall(Sentences)(), 16, data_parallel_size=2)
    cfg.train.num_accumulation_steps = 2
    found = inspect_config(cfg)
    assert [card.origin.shard for card in found.cards] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    few = inspect_config(cfg, samples=2)
    assert [card.origin.shard for card in few.cards] == [0, 1]
    assert found.reports["input_ids"].shape == (8, 12)


def test_rows_in_lanes_are_those_that_each_rank_takes(tmp_path: Path) -> None:
    cfg = config_of(tmp_path, length=150, global_batch_size=16, num_accumulation_steps=2)
    cfg.dataloader.train.sampler = LazyCall(CyclicSampler)(shuffle=True, lanes=4, block=2)
    cfg.train.dist.data_parallel_size = 2
    dataset = TinyDataset(150)
    ranks = [CyclicSampler(dataset, 4, True, 0, rank, 2, seed=1234, lanes=4, block=2) for rank in range(2)]
    for step in (0, 3):
        batches = [rank.batch_at(16 * step + 8 * number) for number in range(2) for rank in ranks]
        expected = [index for batch in batches if batch is not None for index in batch.indices.tolist()]
        assert indices(inspect_config(cfg, step=step)) == expected
    cfg.dataloader.test[0].sampler = LazyCall(SingleRoundSampler)(shuffle=True, lanes=4)
    cfg.dataloader.test[0].dataset.length = 21
    cfg.dataloader.test[0].test_batch_size = 4
    rounds = [SingleRoundSampler(TinyDataset(21), 4, True, rank, 2, seed=1234, lanes=4) for rank in range(2)]
    for step in (0, 2):
        batches = [rank.batch_at(8 * step) for rank in rounds]
        expected = [index for batch in batches if batch is not None for index in batch.indices.tolist()]
        assert indices(inspect_config(cfg, split="test", step=step)) == expected[: 21 - 8 * step]


@pytest.mark.parametrize("ends", ["short", "pad", "drop"])
@pytest.mark.parametrize(("data", "batches"), [(1, 1), (2, 1), (2, 2)])
def test_steps_of_each_epoch_are_those_that_the_ranks_take(tmp_path: Path, ends: str, data: int, batches: int) -> None:
    cfg = config_of(tmp_path, num_accumulation_steps=batches)
    cfg.dataloader.train = LazyCall(from_iterable)(source=LazyCall(TinyDataset)(length=45), ends=ends, shuffle=True)
    cfg.train.dist.data_parallel_size = data
    own = 8 // batches // data
    taken = []  # of each global batch: positions, samples, rows of a rank
    for epoch in range(4):
        for first in range(0, 45, own * data):
            places = np.arange(first, min(first + own * data, 45)) + 45 * epoch
            if len(places) == own * data or ends != "drop":
                of_rank = -(-len(places) // data) if ends == "short" else own
                taken.append((places[0], Order(45, 1234).locate(places)[1].tolist(), of_rank))
    for step in (0, 4, 5, 6, 11, 17):
        parts = taken[step * batches : (step + 1) * batches]
        found = inspect_config(cfg, step=step)
        assert indices(found) == [index for _, samples, _ in parts for index in samples]
        shards = [row // of_rank for _, samples, of_rank in parts for row in range(len(samples))]
        assert [card.origin.shard for card in found.cards] == shards
        told = f"{step}: {len(shards)} samples, positions {parts[0][0]} to {parts[0][0] + len(shards) - 1}"
        assert ("step", told) in found.facts


def rows_of_shard(shard: int, num_shards: int) -> Any:
    return ({"numbers": number} for number in range(shard, 80, num_shards))


@pytest.mark.parametrize("data", [1, 2])
def test_rows_that_depend_on_the_number_of_ranks_are_warned_of(tmp_path: Path, data: int) -> None:
    cfg = config_of(tmp_path)
    cfg.dataloader.train = LazyCall(from_iterable)(source=rows_of_shard, ends="cycle")
    cfg.train.dist.data_parallel_size = data
    warned = any("steps of this mesh have other samples" in finding for finding in inspect_config(cfg).findings)
    assert warned == (data > 1)


def test_a_short_end_in_lanes_is_that_which_the_ranks_take(tmp_path: Path) -> None:
    cfg = config_of(tmp_path)
    cfg.dataloader.train = LazyCall(from_iterable)(source=LazyCall(TinyDataset)(length=95), shuffle=True, lanes=4)
    cfg.train.dist.data_parallel_size = 2
    ranks = [ShortEndSampler(TinyDataset(95), 4, True, rank, 2, seed=1234, lanes=4) for rank in range(2)]
    parts = [rank.batch_at(88) for rank in ranks]
    expected = [index for part in parts if part is not None for index in part.indices.tolist()]
    assert indices(inspect_config(cfg, step=11)) == expected[:7]


@pytest.mark.parametrize("keep", ["function", "bools"])
@pytest.mark.parametrize("lanes", [None, 4])
def test_the_outputs_of_a_filter_are_those_that_each_rank_takes(tmp_path: Path, keep: str, lanes: int | None) -> None:
    cfg = config_of(tmp_path, global_batch_size=16, num_accumulation_steps=2)
    cfg.dataloader.train.dataset = LazyCall(filtered)(keep=keep)
    cfg.dataloader.train.sampler = LazyCall(CyclicSampler)(shuffle=True, lanes=lanes)
    cfg.train.dist.data_parallel_size = 2
    ranks = [CyclicSampler(filtered(keep), 4, True, 0, rank, 2, seed=1234, lanes=lanes) for rank in range(2)]
    for step in (0, 3):
        batches = [rank.batch_at(16 * step + 8 * number) for number in range(2) for rank in ranks]
        starts = [start for batch in batches if batch is not None for start in batch.indices.tolist()]
        found = inspect_config(cfg, step=step)
        assert indices(found) == [None] * 16 and not found.findings
        opened = one_rank_loaders(cfg, 2)
        rows = read_step(opened, "train", opened.loaders[0], step, 2, 4, 16).values["points"]
        opened.close()
        dataset: Any = ranks[0].dataset
        np.testing.assert_array_equal(rows, [dataset[start].points.tensor for start in starts])


def epochs_of_filter(train_batch_size: int, seed: int, num_workers: int, readers: str = "every_rank") -> DataLoader:
    return DataLoader(filtered("bools"), train_batch_size, seed=seed, num_workers=num_workers, readers=readers)


def test_an_epoch_of_a_filter_is_shown_up_to_its_end(tmp_path: Path) -> None:
    cfg = config_of(tmp_path, global_batch_size=16)
    cfg.dataloader.train = LazyCall(epochs_of_filter)()
    kept = filtered("bools")
    points = [sample.points.tensor for sample in map(kept.dataset.__getitem__, range(150)) if is_kept(sample)]
    last = (len(points) - 1) // 16
    for step in (0, last):
        opened = one_rank_loaders(cfg, 1)
        rows = read_step(opened, "train", opened.loaders[0], step, 1, 16, 16).values["points"]
        opened.close()
        np.testing.assert_array_equal(rows, points[16 * step : 16 * step + 16])
    with pytest.raises(ConfigError, match=f"no step {last + 1}: the loader ends before it"):
        inspect_config(cfg, step=last + 1)


@pytest.mark.parametrize(("step", "rows"), [(0, 8), (2, 5)])
def test_the_last_batch_of_an_evaluation_is_shown_without_padding(step: int, rows: int) -> None:
    cfg = config_with(LazyCall(Sentences)(length=21), data_parallel_size=2)
    found = inspect_config(cfg, split="test", step=step)
    assert indices(found) == Order(21, 1234).locate(8 * step + np.arange(rows))[1].tolist()


def test_words_are_decoded_and_coloured_by_their_masks() -> None:
    cfg = config_with(LazyCall(Sentences)())
    cfg.tokenization = {"tokenizer": LazyCall(Words)()}
    card = inspect_config(cfg).cards[0]
    (name, tokens, more), *_ = card.texts
    assert (name, more, len(tokens)) == ("input_ids", 0, 12)
    there = 4 + (card.origin.index or 0) % 8
    for place, token in enumerate(tokens):
        kind = "padding" if place >= there else "counted" if place % 3 == 0 else "plain"
        assert token.kind == kind
        assert token.text == ("<pad>" if kind == "padding" else "[MASK]" if kind == "counted" else token.text)
    labels = card.texts[1][1]
    assert {token.text for token in labels if token.kind == "plain"} == {"·"}
    page = page_of(inspect_config(cfg))
    assert "<span class='counted' title='1'>[MASK]</span>" in page
    assert "<span class='padding' title='0'>&lt;pad&gt;</span>" in page


def test_what_users_data_hold_cannot_become_a_part_of_the_page() -> None:
    cfg = config_with(LazyCall(Sentences)())
    cfg.tokenization = {"tokenizer": LazyCall(Words)()}
    page = page_of(inspect_config(cfg, title="</title><script>alert(2)</script>"))
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page and "&lt;script&gt;alert(2)" in page
    assert "cat &amp; dog" in page
    addresses = re.findall(r"(?:src|href|url)\s*[=(]\s*['\"]?([^'\" )>]+)", page)
    assert all(address.startswith("data:image/png;base64,") for address in addresses)
    assert "http:" not in page and "https:" not in page


def test_the_table_tells_shape_range_layout_and_placement() -> None:
    cfg = config_with(LazyCall(Sentences)(), tensor_parallel_size=2, pipeline_parallel_size=2, pipeline_num_layers=4)
    found = inspect_config(cfg, mesh=mesh_of(cfg, 8))
    ids, mask = found.reports["input_ids"], found.reports["loss_mask"]
    assert (ids.dtype, ids.sample_shape, ids.shape, ids.low) == ("int64", (12,), (8, 12), 0)
    assert (ids.placement, mask.placement) == ("layer 0: stage 0, ranks 0 to 3", "layer -1: stage 1, ranks 4 to 7")
    page = page_of(found)
    for words in ("split_0, split_1", "layer -1: stage 1, ranks 4 to 7", "[0:4, 6:12] of [8, 12]", "on another stage"):
        assert words in page


class Ragged(Sentences):
    def __getitem__(self, index: int) -> Any:
        return {"input_ids": np.arange(1, 4 + index % 8)}


def test_lengths_before_padding_are_told_of_batches_that_a_collator_pads() -> None:
    cfg = config_with(LazyCall(Ragged)(), collate_fn=LazyCall(PadCollator)(fields={"input_ids": {"multiple": 8}}))
    found = inspect_config(cfg)
    assert list(found.histograms) == ["input_ids: lengths before padding"]
    assert found.reports["input_ids"].sample_shape in ((8,), (16,))


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tests/engine/tiny_config.py", "--samples", "4", "train.global_batch_size=4", "--ranks", "2"]
    assert main([*arguments, "--output", str(tmp_path / "new" / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert f"The page is {tmp_path}/new/page.html." in shown
    assert "rank 1" in (tmp_path / "new" / "page.html").read_text()


def test_a_dataset_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="the dataset is empty"):
        inspect_config(config_with(LazyCall(Planted)(length=0)))
