"""Samples are those of Megatron-Core 0.16.1, over corpora that its own writer made; see `megatron_core/make.py`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.data.datasets import GPTDataset
from libai_data.data.sources import IndexedSource, IndexedWriter
from tests.data.datasets.gpt_corpora import samples

MADE = Path(__file__).with_name("megatron_core")
LENGTH = 8
CORPORA = sorted(path.stem for path in MADE.glob("*.bin"))
RESETS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "reset": RESETS,
    "epochs": {**RESETS, "num_epochs": 3},
    "padded": {**RESETS, "pad_last": True},
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files, where indices may be written beside them."""
    return Path(shutil.copytree(MADE, tmp_path_factory.mktemp("corpora") / "made"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("corpus", CORPORA)
def test_samples_are_megatrons(corpora: Path, corpus: str, case: str) -> None:
    with np.load(MADE / "samples.npz") as made:
        tokens, labels, loss, positions = made[f"{corpus}/{case}"]
        seen = np.unpackbits(made[f"{corpus}/{case}/seen"])[: len(tokens) * LENGTH**2]
    rows = samples(GPTDataset(corpora / corpus, LENGTH, **CASES[case]))
    found = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    np.testing.assert_array_equal(found["input_ids"], tokens)
    np.testing.assert_array_equal(found["labels"], labels)
    if case == "plain":
        assert (loss == 1).all() and (positions == np.arange(LENGTH)).all()
        return
    np.testing.assert_array_equal(found["loss_mask"], loss)
    # Behind the last token, where nothing counts, Megatron-Core's positions go on.
    real = tokens != 0
    np.testing.assert_array_equal(found["position_ids"][real], positions[real])
    both = real[:, :, None] & real[:, None, :]
    np.testing.assert_array_equal(found["attention_mask"][both], seen.reshape(both.shape)[both].astype(bool))


@pytest.mark.parametrize("corpus", CORPORA)
def test_its_files_are_read_and_written_byte_for_byte(corpora: Path, tmp_path: Path, corpus: str) -> None:
    source = IndexedSource(corpora / corpus)
    with IndexedWriter(tmp_path / "own", source.dtype) as writer:
        for number in range(source.num_documents):
            writer.add_document([source.document(number)])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"own{suffix}").read_bytes() == (MADE / f"{corpus}{suffix}").read_bytes()


def test_there_are_corpora_of_each_kind() -> None:
    assert CORPORA == ["empty", "exact", "many", "one", "short", "wide"]
