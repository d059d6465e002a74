"""Batches of GPT samples: the same tokens by whichever way they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from libai_data.data.datasets import gpt_batch
from libai_data.data.datasets.gpt import GPTDataset
from tests.data.datasets.gpt_corpora import Documents, corpora, write
from tests.properties import examples

KINDS: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle_documents": True},
    "padded": {"shuffle_documents": True, "pad_last": True},
    "reset": {"reset_position_ids": True, "eod_mask_loss": True},
    "packed": {"packing": True},
}


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=corpora(10, 14),
    length=st.integers(1, 9),
    epochs=st.integers(1, 3),
    kind=st.sampled_from(sorted(KINDS)),
    low=st.integers(0, 4),
    seed=st.integers(0, 9),
)
def test_tokens_copied_in_slices_are_those_found_one_by_one(
    tmp_path: Path, documents: Documents, length: int, epochs: int, kind: str, low: int, seed: int
) -> None:
    assume(epochs * sum(max(len(document) - 1, 0) for document in documents) > length)
    dataset = GPTDataset(write(tmp_path / "a", documents), length, num_epochs=epochs, **KINDS[kind])
    indices = np.random.default_rng(seed).integers(0, len(dataset), 4)
    own = slice(min(low, length - 1), length)
    found = []
    for tokens_a_slice in (1, 1 << 30):
        rows = {name: np.asarray(field.tensor) for name, field in dataset[0].get_fields().items()}
        parts = {name: (own,) for name in rows if name != "cu_seqlens"}
        out = {
            name: np.empty((4, len(array) if name == "cu_seqlens" else own.stop - own.start), array.dtype)
            for name, array in rows.items()
        }
        with mock.patch.object(gpt_batch, "_TOKENS_A_SLICE", tokens_a_slice):
            dataset.read_batch(indices, out, parts)
        found.append(out)
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name], err_msg=name)
