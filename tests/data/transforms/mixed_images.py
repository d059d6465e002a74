"""Small labelled images for tests of batch transforms, in a module that a worker process imports quickly."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.structures import DistTensorData, Instance

CLASSES = 7


def image_of(index: int, form: str) -> np.ndarray:
    """The image of a sample: every pixel tells which image it is of, and where it was."""
    pixels = np.arange(6 * 5 * 3).reshape(6, 5, 3) + 100 * (index % 2)
    return pixels.astype(np.uint8) if form == "uint8" else index + pixels.transpose(2, 0, 1).astype(np.float32) / 128


class Images:
    """`images` float32 [3, 6, 5] or uint8 [6, 5, 3], and `labels`.

    Args:
        form: "float32" or "uint8".
        fails: an index that cannot be read.
        kills: a file; reading index 5 ends the process while the file is there.
    """

    def __init__(self, form: str = "float32", fails: int | None = None, kills: Path | None = None) -> None:
        self.form = form
        self.fails = fails
        self.kills = kills

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Instance:
        if index == self.fails:
            raise OSError("unreadable")
        if self.kills is not None and index == 5 and self.kills.exists():
            self.kills.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        label = DistTensorData(np.array(index % CLASSES), placement_idx=-1)
        return Instance(images=DistTensorData(image_of(index, self.form)), labels=label)


class FilledImages(Images):
    """The same, read together."""

    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        for row, index in enumerate(indices.tolist()):
            sample = self[index]
            for name in out:
                out[name][row] = sample.get(name).tensor


class FetchedImages(Images):
    """The same, fetched together."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]
