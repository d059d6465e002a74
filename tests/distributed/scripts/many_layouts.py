"""What the ranks of `deliver_batches.py` read, and how it is to lie on them; the test computes the truth from it."""

from __future__ import annotations

import hashlib
import random
from typing import Any, NamedTuple

import numpy as np

from libai_data.data.random.sample_random import sample_generator
from libai_data.structures import DistTensorData, Instance

SAMPLES = 30
SEED = 7
STEPS = 6
"""Batches of 12, so that epochs end within the third and with the fifth."""

RESUMED_STEPS = 3


class Case(NamedTuple):
    """One pass of a loader on each mesh."""

    name: str
    global_batch_size: int
    steps: int
    position: int
    readers: str = "every_rank"


CASES = [
    Case("fresh", 12, STEPS, 0),
    Case("resumed", 12, RESUMED_STEPS, 24),
    Case("resumed with larger batches", 24, RESUMED_STEPS, 24),
    Case("read by one rank of each node", 12, RESUMED_STEPS, 0, "node"),
    Case("read by rank 0", 12, RESUMED_STEPS, 0, "rank0"),
]

LAYOUTS: dict[str, tuple[tuple[str, str], int]] = {
    "images": (("split_0", "broadcast"), 0),
    "labels": (("split_0", "broadcast"), -1),
    "hidden": (("split_0", "split_1"), 0),
    "mask": (("split_0", "split_1"), -1),
    "shared": (("broadcast", "broadcast"), 0),
    "shared_last": (("broadcast", "broadcast"), -1),
    "rows": (("split_0", "split_0"), 0),
    "across": (("split_1", "broadcast"), 0),
    "crossed": (("broadcast", "split_0"), 0),
    "bytes": (("split_1", "broadcast"), 0),
    "halves": (("split_0", "split_1"), -1),
    "noise": (("split_0", "broadcast"), -1),
}


class ManyLayouts:
    """Samples of many dtypes, ranks and layouts, all bytes of which depend on the index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Instance:
        rng = np.random.default_rng(index)
        arrays: dict[str, Any] = {
            "images": rng.integers(0, 256, (3, 4, 5), dtype=np.uint8),
            "labels": np.int64(index - 2**40),
            "hidden": rng.standard_normal((8, 3), dtype=np.float32),
            "mask": rng.integers(0, 2, 8).astype(bool),
            "shared": rng.standard_normal(5).astype(np.float16),
            "shared_last": rng.integers(-128, 128, (2, 2), dtype=np.int8),
            "rows": rng.integers(-(2**31), 2**31, 2, dtype=np.int32),
            "across": rng.standard_normal(12),
            "crossed": rng.integers(-(2**63), 2**63 - 1, (4, 2)),
            "bytes": rng.integers(0, 256, 12, dtype=np.uint8),
            "halves": rng.standard_normal((8, 2)).astype(np.float16),
            # From the sample's own generator, and from those that all code shares.
            "noise": sample_generator().random(3, dtype=np.float32) + np.float32(random.random() + np.random.random()),
        }
        return Instance(**{name: DistTensorData(arrays[name], list(sbp), idx) for name, (sbp, idx) in LAYOUTS.items()})


def digest(array: np.ndarray) -> str:
    """The dtype, shape and bytes of a field, in short."""
    content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
    return f"{array.dtype} {list(array.shape)} {content}"
