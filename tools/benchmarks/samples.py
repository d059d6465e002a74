"""The samples that all loaders of the peers' suite read, from the same files; needs nothing but numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

TOKEN_FIELDS = ("input_ids", "position_ids", "loss_mask", "labels")
TOKENS = 1024
IMAGE_SHAPE = (3, 224, 224)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PLAIN, IMAGES, JPEG, GPT = "plain.bin", "images.npy", "jpeg", "gpt.bin"


class _Mapped:
    """Samples of a file that each process maps for itself.

    Args:
        path: of the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.array = self._map()

    def _map(self) -> np.ndarray:
        raise NotImplementedError

    def __getstate__(self) -> str:
        return self.path

    def __setstate__(self, path: str) -> None:
        self.path = path
        self.array = self._map()

    def __len__(self) -> int:
        return len(self.array)


class PlainTokens(_Mapped):
    """Four fields int64 [1024] from a memory map of uint16."""

    def _map(self) -> np.ndarray:
        return map_tokens(self.path)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        sample = self.array[index]
        return {name: sample[place].astype(np.int64) for place, name in enumerate(TOKEN_FIELDS)}


class MappedImages(_Mapped):
    """An image float32 [3, 224, 224], a view of the memory map, and a label."""

    def _map(self) -> np.ndarray:
        # Copy on write: PyTorch warns of memory that cannot be written to.
        return np.asarray(np.load(self.path, mmap_mode="c"))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"images": self.array[index], "labels": np.int64(index)}


class GptTokens(_Mapped):
    """Two fields int64 [1024], one token apart, from a memory map of uint16."""

    def _map(self) -> np.ndarray:
        return np.asarray(np.memmap(self.path, np.uint16, mode="r"))

    def __len__(self) -> int:
        return (len(self.array) - 1) // TOKENS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        sample = self.array[index * TOKENS : (index + 1) * TOKENS + 1].astype(np.int64)
        return {"input_ids": sample[:-1], "labels": sample[1:]}


class Photographs:
    """Paths of JPEG files, and the number of the folder that each lies in.

    Args:
        path: of the folder that holds a folder for each class.
    """

    def __init__(self, path: str) -> None:
        files = sorted(Path(path).rglob("*.jpg"))
        names = sorted({file.parent.name for file in files})
        self.files = [(str(file), names.index(file.parent.name)) for file in files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.files[index]


SAMPLES: dict[str, type[Any]] = {PLAIN: PlainTokens, IMAGES: MappedImages, GPT: GptTokens, JPEG: Photographs}
"""Name of a file or folder -> its samples."""

FIELDS: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {
    PLAIN: dict.fromkeys(TOKEN_FIELDS, ((TOKENS,), "int64")),
    IMAGES: {"images": (IMAGE_SHAPE, "float32"), "labels": ((), "int64")},
    JPEG: {"images": (IMAGE_SHAPE, "float32"), "labels": ((), "int64")},
    GPT: {"input_ids": ((TOKENS,), "int64"), "labels": ((TOKENS,), "int64")},
}
"""Name of a file or folder -> field -> shape of a sample, and dtype; each loader's batches are checked against it."""


def map_tokens(path: str | Path) -> np.ndarray:
    """The tokens of a file, uint16 [samples, fields, tokens], as a plain array over the memory map."""
    return np.asarray(np.memmap(path, dtype=np.uint16, mode="r").reshape(-1, len(TOKEN_FIELDS), TOKENS))
