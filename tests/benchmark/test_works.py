"""All contenders do the same work: equal samples, read one by one or together."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from libai_data.benchmark.works import (
    TOKEN_FIELDS,
    TOKENS,
    FlowImages,
    FlowTokens,
    TokenBatches,
    Tokens,
    make_images,
    map_tokens,
    write_tokens,
)


def test_a_batch_read_together_holds_the_samples_read_one_by_one(tmp_path: Path) -> None:
    dataset = TokenBatches(map_tokens(write_tokens(tmp_path / "tokens.bin", 64)))
    indices = np.array([5, 0, 63, 5])
    out = {name: np.zeros((4, TOKENS), np.int64) for name in TOKEN_FIELDS}
    dataset.read_batch(indices, out)
    for row, index in enumerate(indices.tolist()):
        for name, value in dataset[index].get_fields().items():
            assert out[name][row].tolist() == value.tensor.tolist()


def test_oneflow_gets_the_same_samples(tmp_path: Path) -> None:
    tokens = map_tokens(write_tokens(tmp_path / "tokens.bin", 4))
    images = make_images(2)
    for ours, theirs in ((Tokens(tokens), FlowTokens(tokens)), (images, FlowImages(images.images, images.labels))):
        for name, value in ours[1].get_fields().items():
            assert np.array_equal(theirs[1].get(name).tensor.numpy(), value.tensor)


def test_a_long_dataset_repeats_its_samples(tmp_path: Path) -> None:
    dataset = Tokens(map_tokens(write_tokens(tmp_path / "tokens.bin", 4)), length=10**8)
    assert len(dataset) == 10**8
    assert np.array_equal(dataset[10**8 - 1].get("labels").tensor, dataset[3].get("labels").tensor)
