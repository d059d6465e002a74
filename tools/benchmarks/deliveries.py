"""What the ranks measure: batches made global by this project, and by its peers at their best use.

Each contender is opened and measured on all ranks, in lockstep; the numbers of rank 0 count.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Any, Callable

import numpy as np

from libai_data import DataLoader
from libai_data.data.datasets import ImageFolderDataset
from libai_data.data.samplers import CyclicSampler
from libai_data.delivery import to_global
from libai_data.delivery.build import build_image_train_loader
from libai_data.delivery.contract import check_contract
from libai_data.mesh import (
    broadcast_py_object,
    get_layer_placement,
    get_mesh,
    get_nd_sbp,
    is_main_process,
    set_mesh,
    synchronize,
)
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.structures import Instance, Origin, origin_of
from tools.benchmarks.rows import Measure, Scale
from tools.benchmarks.samples import IMAGE_SHAPE, TOKEN_FIELDS, TOKENS
from tools.benchmarks.samples import JPEG as PICTURES
from tools.benchmarks.training import DIGITS, GPT, digits_times, milliseconds_a_step, share_of_data
from tools.benchmarks.works import ReadyImages, Resized

RANKS = 4
CHECK_EVERY = 100
_WARM_UP, _TRIAL, _FEWEST = 3, 5, 5
_ROWS, _RANK0_ROWS = 32, 16
_BATCHES_IN_TURN = 4

Opened = Callable[[Scale], AbstractContextManager[Measure]]


def seconds_a_step(step: Callable[[], Any], seconds: float) -> float:
    """Do a step on all ranks for about so many seconds, equally often on each; returns seconds a step.

    Args:
        step: collective; what it returns is let go of when all that it started is done.
        seconds: how long to measure.
    """
    _timed(step, _WARM_UP)
    count = max(_FEWEST, int(seconds * _TRIAL / _timed(step, _TRIAL)))
    count = broadcast_py_object(count, src=0)
    return _timed(step, count) / count


def _timed(step: Callable[[], Any], count: int) -> float:
    import oneflow as flow

    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        result = step()
        # OneFlow's operators run behind Python's back; a batch has come when they are done.
        flow._oneflow_internal.eager.Sync()
        del result
    synchronize()
    return time.perf_counter() - start


def _on_mesh(data: int, tensor: int) -> None:
    import oneflow as flow

    set_mesh(ParallelMesh(data, tensor, 1, rank=flow.env.get_rank()))


@contextmanager
def _ready(dataset: Any, data: int, tensor: int, make: Callable[[Any], Any], scale: Scale) -> Iterator[Measure]:
    """Batches that every rank has read already, made global in turn."""
    _on_mesh(data, tensor)
    batches = itertools.cycle(_read(dataset))
    yield lambda: seconds_a_step(lambda: make(next(batches)), scale.seconds)


def _tokens() -> list[dict[str, np.ndarray]]:
    return [{name: np.zeros(TOKENS, np.int64) for name in TOKEN_FIELDS}] * (_BATCHES_IN_TURN * RANKS * _ROWS)


def _images() -> ReadyImages:
    return ReadyImages(labels=False)


def _read(dataset: Any) -> list[Instance]:
    mesh = get_mesh()
    sampler = CyclicSampler(
        dataset, _ROWS, data_parallel_rank=mesh.data_parallel_rank, data_parallel_size=mesh.data_parallel_size
    )
    with closing(DataLoader(dataset, sampler, check_every=CHECK_EVERY)) as loader:
        return list(itertools.islice(loader, _BATCHES_IN_TURN))


def _field_by_field(batch: Instance) -> dict[str, Any]:
    """As LiBai does it: OneFlow compares shapes and dtypes between ranks, and sends what is broadcast."""
    import oneflow as flow

    sbp = get_nd_sbp([flow.sbp.split(0), flow.sbp.broadcast])
    placement = get_layer_placement(0)
    return {name: value.tensor.to_global(placement=placement, sbp=sbp) for name, value in batch.get_fields().items()}


@contextmanager
def _rank0_ours(data: int, tensor: int, scale: Scale) -> Iterator[Measure]:
    """Rank 0 alone has the batches; reading costs it nothing."""
    _on_mesh(data, tensor)
    loader, _, _ = build_image_train_loader(
        ReadyImages(), _RANK0_ROWS // data, num_workers=0, readers="rank0", check_every=CHECK_EVERY
    )
    with closing(loader):
        batches = iter(loader)
        yield lambda: seconds_a_step(lambda: to_global(next(batches)), scale.seconds)


@contextmanager
def _rank0_as_the_guide_shows(data: int, tensor: int, scale: Scale) -> Iterator[Measure]:
    """A barrier, then field by field: rank 0's batch to all ranks, and from there split. Placeholders are made once."""
    import oneflow as flow

    _on_mesh(data, tensor)
    shapes: list[tuple[tuple[int, ...], Any]] = [
        ((_RANK0_ROWS, *IMAGE_SHAPE), flow.float32),
        ((_RANK0_ROWS,), flow.int64),
    ]
    fields = [(flow.ones if is_main_process() else flow.empty)(shape, dtype=dtype) for shape, dtype in shapes]
    placement = get_layer_placement(0)
    everywhere = get_nd_sbp([flow.sbp.broadcast, flow.sbp.broadcast])
    rows = get_nd_sbp([flow.sbp.split(0), flow.sbp.broadcast])

    def step() -> list[Any]:
        synchronize()
        whole = [field.to_global(placement=placement, sbp=everywhere) for field in fields]
        return [field.to_global(placement=placement, sbp=rows) for field in whole]

    yield lambda: seconds_a_step(step, scale.seconds)


@contextmanager
def _pictures(data: int, tensor: int, readers: str, workers: int, scale: Scale) -> Iterator[Measure]:
    """JPEGs decoded, cut to size and delivered."""
    _on_mesh(data, tensor)
    dataset = ImageFolderDataset(scale.folder / PICTURES, transform=Resized())
    rows = (16 if scale.quick else 64) // data
    loader, _, _ = build_image_train_loader(dataset, rows, num_workers=workers, readers=readers)
    with closing(loader):
        batches = iter(loader)
        yield lambda: seconds_a_step(lambda: to_global(next(batches)), scale.seconds)


@contextmanager
def _check(dataset: Any, scale: Scale) -> Iterator[Measure]:
    """What a comparison of contents every so many batches costs, 2 x 2, as a share of the digits ViT's steps, %."""
    step = digits_times(scale).seconds
    _on_mesh(2, 2)
    batch = _read(dataset)[0]
    fields, origin = batch.get_fields(), Origin(*origin_of(batch)[:2])

    def check() -> None:
        check_contract(fields, origin)

    yield lambda: 100 * seconds_a_step(check, scale.seconds) / (CHECK_EVERY * step)


def _ready_row(row: str, make_dataset: Callable[[], Any], data: int, tensor: int) -> dict[str, Opened]:
    return {
        f"{row}/libai_data": lambda scale: _ready(make_dataset(), data, tensor, to_global, scale),
        f"{row}/to_global": lambda scale: _ready(make_dataset(), data, tensor, _field_by_field, scale),
    }


def _rank0_row(row: str, data: int, tensor: int) -> dict[str, Opened]:
    return {
        f"{row}/libai_data": partial(_rank0_ours, data, tensor),
        f"{row}/guide": partial(_rank0_as_the_guide_shows, data, tensor),
    }


def _jpeg_row(row: str, data: int, tensor: int) -> dict[str, Opened]:
    """As many workers in all, of one rank or of every rank."""
    return {
        f"{row}/node": partial(_pictures, data, tensor, "node", RANKS),
        f"{row}/every_rank": partial(_pictures, data, tensor, "every_rank", 1),
    }


CONTENDERS: dict[str, Opened] = {
    **_ready_row("tokens", _tokens, 4, 1),
    **_ready_row("images", _images, 2, 2),
    **_rank0_row("rank0-4x1", 4, 1),
    **_rank0_row("rank0-2x2", 2, 2),
    **_jpeg_row("jpeg-1x4", 1, 4),
    **_jpeg_row("jpeg-2x2", 2, 2),
    **{
        f"{kind}-{ranks}/{name}": partial(opened, kind)
        for kind in (DIGITS, GPT)
        for ranks in (1, RANKS)
        for name, opened in (("data", share_of_data), ("step", milliseconds_a_step))
    },
    "checks/tokens": lambda scale: _check(_tokens(), scale),
    "checks/images": lambda scale: _check(_images(), scale),
}
"""What can be measured: row and contender -> how to open it on each rank."""
