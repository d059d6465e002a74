"""`get_worker_info`: which worker process this is, for datasets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from libai_data.data.random.hashing import combine64

_OTHERS = ("torch.utils.data._utils.worker", "oneflow.utils.data._utils.worker")


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


def set_worker_info(info: WorkerInfo) -> None:
    """Set which worker this process is, also for `get_worker_info` of PyTorch and OneFlow if these are imported."""
    global _here
    _here = info
    for module in _others():
        # Workers of PyTorch and OneFlow have different seeds.
        seed = combine64(info.seed, info.id) >> 1
        module._worker_info = module.WorkerInfo(
            id=info.id, num_workers=info.num_workers, seed=seed, dataset=info.dataset
        )


@contextmanager
def being_worker(info: WorkerInfo) -> Iterator[None]:
    """Set within the block which worker this process is."""
    global _here
    here, others = _here, [(module, module._worker_info) for module in _others()]
    set_worker_info(info)
    try:
        yield
    finally:
        _here = here
        for module, other in others:
            module._worker_info = other


def _others() -> list[Any]:
    return [sys.modules[name] for name in _OTHERS if name in sys.modules]
