"""Makes the files beside it: corpora by Megatron-Core's own writer, and the samples that its GPTDataset makes of them.

In an environment of its own, with megatron-core==0.16.1, torch and numpy<2:

    python make.py <this folder>

Its shuffles are left out, so that documents and samples lie in the order of the files.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # type: ignore[import-not-found]
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder  # type: ignore[import-not-found]
from megatron.core.datasets.utils import Split  # type: ignore[import-not-found]

EOD, PAD, LENGTH = 1, 60000, 8
# Lengths of documents, their end included. Empty ones are none of Megatron-Core's samples.
CORPORA: dict[str, tuple[Any, list[int]]] = {
    "many": (np.uint16, [5, 9, 1, 3, 17, 2, 8, 6, 30, 4]),
    "one": (np.uint16, [41]),
    "exact": (np.int32, [8, 16, 9]),  # 33 tokens: four samples, and the last label
    "empty": (np.uint16, [0, 7, 0, 0, 12, 6, 0]),
    "short": (np.int32, [1, 1, 2, 1, 3, 1, 1, 2, 4, 1]),
    "wide": (np.int64, [11, 20, 3]),
}
CASES: dict[str, tuple[int, bool, Split]] = {
    # Epochs, whether positions and masks are reset at the ends of documents, part.
    "plain": (1, False, Split.train),
    "reset": (1, True, Split.train),
    "epochs": (3, True, Split.train),
    "padded": (1, True, Split.valid),
}


class Still(np.random.RandomState):
    """Shuffles nothing."""

    def shuffle(self, x: Any) -> None:
        return None


def write(prefix: Path, dtype: Any, lengths: list[int]) -> None:
    random = np.random.default_rng(len(lengths))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for length in lengths:
        tokens = random.integers(2, 200, length)
        tokens[-1:] = EOD
        builder.add_document(torch.from_numpy(tokens), [length])
    builder.finalize(f"{prefix}.idx")


def samples(prefix: Path, epochs: int, resets: bool, split: Split, cache: str) -> dict[str, np.ndarray]:
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=cache,
        tokenizer=SimpleNamespace(eod=EOD, pad=PAD, vocab_size=None, unique_identifiers={}),
        reset_position_ids=resets,
        reset_attention_mask=resets,
        eod_mask_loss=resets,
        drop_last_partial_validation_sequence=False,
    )
    source = IndexedDataset(str(prefix))
    numbers = np.arange(len(source.sequence_lengths), dtype=np.int32)
    tokens = int(source.sequence_lengths.sum())
    wanted = None if epochs == 1 else (epochs * tokens - 1) // LENGTH
    dataset = GPTDataset(source, str(prefix), numbers, wanted, split, config)
    found = [dataset[index] for index in range(len(dataset))]
    return {name: np.stack([sample[name].numpy() for sample in found]) for name in found[0]}


def main(folder: Path) -> None:
    np.random.RandomState = Still  # type: ignore[misc]
    arrays: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as cache:
        for name, (dtype, lengths) in CORPORA.items():
            write(folder / name, dtype, lengths)
            for case, options in CASES.items():
                found = samples(folder / name, *options, f"{cache}/{name}-{case}")
                hidden = found.pop("attention_mask")[:, 0]
                arrays[f"{name}/{case}/seen"] = np.packbits(~hidden)
                fields = ("tokens", "labels", "loss_mask", "position_ids")
                arrays[f"{name}/{case}"] = np.stack([found[field] for field in fields]).astype(np.uint8)
    np.savez_compressed(folder / "samples.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
