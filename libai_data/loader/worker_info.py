"""`get_worker_info`: which worker process this is, for datasets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerInfo:
    """A worker process of a loader.

    Args:
        id: its number, from 0.
        num_workers: of the loader.
        seed: of the loader; samples draw from generators of their own, whichever worker reads them.
        dataset: this process's copy.
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any


_here: WorkerInfo | None = None


def get_worker_info() -> WorkerInfo | None:
    """The worker of this process. None in a process that is no worker, and in reading threads."""
    return _here


def set_worker_info(info: WorkerInfo | None) -> None:
    """Say which worker this process is, or that it is none."""
    global _here
    _here = info
