"""Datasets that differ, fork or read by descriptors, in a module that a worker process imports quickly."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np

from libai_data.data.transforms.batch import BatchTransform
from libai_data.loader.default_collate import default_collate
from libai_data.structures import DistTensorData, Instance
from tests.loader.sample_datasets import Numbers


def four_numbers(shard: int, num_shards: int) -> Iterator[dict[str, int]]:
    """A shard of a stream: {"number": int64 []}."""
    return ({"number": number} for number in range(4))


class ByDescriptor(Numbers):
    """Reads a file by the number of its descriptor, and opens many other files where it is unpickled."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.descriptor = descriptor

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.others = [open(__file__, "rb") for _ in range(100)]  # noqa: SIM115

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if os.pread(self.descriptor, 5, 0) == b"right" else Instance()


class ByPipe(ByDescriptor):
    """The same for a pipe, which has no positions."""

    def __getitem__(self, index: int) -> Any:
        return Numbers.__getitem__(self, len(os.read(self.descriptor, 1)))


class Mixed(Numbers):
    """Greyscale images among others, or samples that differ in something else."""

    def __init__(self, grey: Sequence[int], what: str = "shape", size: int = 64) -> None:
        super().__init__(size)
        self.grey, self.what = frozenset(grey), what

    def __getitem__(self, index: int) -> Any:
        image, grey = np.zeros((2, 2, 3), np.uint8), index in self.grey
        if grey and self.what in ("no dict", "a list"):
            return None if self.what == "no dict" else [1, 2]
        sample = {"image": image, "index": DistTensorData(np.array(index))}
        if grey:
            placed = DistTensorData(image, placement_idx=-1)
            changed = {"shape": image[..., 0], "dtype": image.astype(np.float32), "layout": placed}
            sample["image"] = changed.get(self.what, image)
            if self.what == "fields":
                del sample["image"]
            if self.what == "no tensor":
                sample["image"] = "a name"
        return sample


class MixedTogether(Mixed):
    """The same, several at once."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


class MixedFilled(Mixed):
    """The same, written into a batch."""

    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        for row, index in enumerate(indices.tolist()):
            out["image"][row][...] = self[index]["image"]
            out["index"][row] = index


class Forking:
    """Forks its process while a sample is read; the child returns as the parent does."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, int]:
        if index == self.at:
            fork_and_wait()
        return {"x": index}


class ForkingStream:
    """The same as a stream."""

    def __init__(self, at: int) -> None:
        self.rows = Forking(at)

    def __iter__(self) -> Iterator[dict[str, int]]:
        return (self.rows[index] for index in range(40))


class ForkingInBatches(Forking):
    """Forks its process while `read_batch` reads."""

    def read_batch(self, indices: Any, out: Any) -> None:
        out["x"][...] = indices
        if self.at in indices:
            fork_that_spoils(out["x"])


class ForkingTransform(BatchTransform):
    def __call__(self, rows: Any, random: Any) -> None:
        if 7 in rows["x"]:
            fork_that_spoils(rows["x"])


def fork_and_wait(act: Callable[[], Any] = int) -> None:
    """Fork a process that acts and then returns as the parent does, which waits until the process has ended."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    else:
        act()


def fork_that_spoils(rows: Any) -> None:
    """Fork a process that changes the rows."""
    fork_and_wait(lambda: rows.fill(-1))


def forking_collate(samples: Any) -> Any:
    if samples[0]["x"] == 6:
        fork_and_wait()
    return default_collate(samples)


def forking_init(number: int) -> None:
    fork_and_wait()
