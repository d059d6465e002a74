"""The table of a blend: what the stream takes of each dataset, counted on the stream itself."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from libai_data.data.datasets import BlendedDataset, ConcatDataset, GPTDataset, Map, PackedDataset, Subset
from libai_data.data.datasets.blend_table import log_blend, name_of
from tests.data.datasets.gpt_corpora import write


def rows(count: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.array([number])} for number in range(count)]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [" ".join(line.split()) for line in caplog.text.splitlines()]


def test_the_table_names_corpora_and_a_small_one_that_repeats_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = GPTDataset(write(tmp_path / "large", [[*range(1, 802)]]), 8)
    small = GPTDataset(write(tmp_path / "small", [[*range(1, 82)]]), 8)
    with caplog.at_level(logging.INFO):
        log_blend(BlendedDataset([large, small], [1, 1]), 100, lambda step: 4 * step)
    assert f"{tmp_path}/large 100 801 50.0 % 50.0 % 0.50" in told(caplog)
    assert f"{tmp_path}/small 10 81 50.0 % 50.0 % 5.00" in told(caplog)
    assert f"sees {tmp_path}/small 5.0 times" in caplog.text
    caplog.clear()
    # From step 5 on, place 20, the small one is left out.
    with caplog.at_level(logging.INFO):
        log_blend(BlendedDataset([large, small], [1, 1], changes_at_steps={5: [1, 0]}), 100, lambda step: 4 * step)
        log_blend(rows(3), 100, lambda step: step)
    assert "1.00" in caplog.text and "more than" not in caplog.text


def test_a_dataset_is_named_by_its_class_and_a_part_of_it_by_the_whole() -> None:
    class Texts:
        def __init__(self) -> None:
            self.dataset = np.zeros((4, 2))

        def __len__(self) -> int:
            return len(self.dataset)

    assert name_of(Texts()) == name_of(Subset(Texts(), 1, 3)) == "Texts"


def test_the_table_says_where_max_epochs_ends_a_dataset_and_counts_repeats_of_a_corpus(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = Map(GPTDataset(write(tmp_path / "large", [[*range(1, 802)]]), 8), dict)
    small = GPTDataset(write(tmp_path / "small", [[*range(1, 82)]]), 8, num_epochs=3)
    with caplog.at_level(logging.INFO):
        log_blend(BlendedDataset([large, small], [1, 1], max_epochs=[None, 2]), 100, lambda step: 4 * step)
    # 30 samples of three passes but for two tokens, taken 5 / 3 times.
    assert f"{tmp_path}/small 30 241 50.0 % 50.0 % 4.96 5.95" in told(caplog)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        log_blend(BlendedDataset([large, small], [1, 1], max_epochs=[None, 0.5]), 100, lambda step: 4 * step)
        log_blend(ConcatDataset([large, small]), 65, lambda step: 4 * step)
        log_blend(small, 60, lambda step: 4 * step)
    assert f"{tmp_path}/large 100 801 50.0 % 85.0 % 0.85" in told(caplog)
    assert f"{tmp_path}/small 30 241 50.0 % 15.0 % 1.49 1.49" in told(caplog)
    assert f"{tmp_path}/small 30 241 23.1 % 23.1 % 1.49" in told(caplog)
    assert f"{tmp_path}/small 30 241 100.0 % 100.0 % 5.95" in told(caplog)


def test_the_table_of_packed_datasets_counts_the_samples_that_are_packed(caplog: pytest.LogCaptureFixture) -> None:
    lengths = np.array([1] * 50 + [3] * 50)
    blend = BlendedDataset([rows(50), rows(50)], [1, 1])
    packs = PackedDataset(blend, 16, lengths=lengths)
    assert {len(sample["x"]) for sample in blend.datasets[0]} == {1}
    with caplog.at_level(logging.INFO):
        log_blend(packs, 25, lambda step: step)
    # 400 tokens are 200 samples, 2 tokens each on average.
    assert told(caplog)[-2:] == ["list 50 ? 50.0 % 50.0 % 2.00"] * 2
    caplog.clear()
    log_blend(PackedDataset(blend, 16), 25, lambda step: step)
    assert not caplog.text
