"""Copies between files, which have whole tensors, and ranks, which have parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from libai_data.engine.checkpoint.tensor_file import TensorFile
from libai_data.errors import CheckpointError
from libai_data.mesh.current import get_rank, is_main_process, tensor_to_rank0


def split_range(length: int, parts: int, part: int) -> tuple[int, int]:
    """Begin and end of a part, as OneFlow splits: the first `length % parts` parts have one more item."""
    small, larger = divmod(length, parts)
    begin = part * small + min(part, larger)
    return begin, begin + small + (1 if part < larger else 0)


def own_part(
    shape: Sequence[int], ranks: np.ndarray, split_dims: Sequence[int | None], rank: int
) -> tuple[slice, ...] | None:
    """The part of a global tensor that a rank has: a slice for each dim; None if the rank is not in the placement.

    For each axis of the placement `ranks` [axis, ...], `split_dims` has the dim that it splits, or None for broadcast.
    """
    coordinates = np.argwhere(np.asarray(ranks) == rank)
    if len(coordinates) == 0:
        return None
    bounds = [(0, size) for size in shape]
    for axis, dim in enumerate(split_dims):
        if dim is None:
            continue
        begin, end = bounds[dim]
        first, last = split_range(end - begin, ranks.shape[axis], int(coordinates[0][axis]))
        bounds[dim] = (begin + first, begin + last)
    return tuple(slice(begin, end) for begin, end in bounds)


def split_dims_of(tensor: Any) -> tuple[int | None, ...]:
    """The dim that each axis of a global tensor's placement splits, or None; CheckpointError for a partial sum."""
    import oneflow as flow

    splits = {flow.sbp.split(dim): dim for dim in range(len(tensor.shape))}
    dims = []
    for sbp in tensor.sbp:
        if sbp != flow.sbp.broadcast and sbp not in splits:
            raise CheckpointError(
                f"a tensor of shape {tuple(tensor.shape)} has signature {tensor.sbp}; use split or broadcast"
            )
        dims.append(splits.get(sbp))
    return tuple(dims)


def fill(tensor: Any, file: TensorFile, name: str) -> None:
    """Copy this rank's part of a stored tensor into `tensor`, in place and without communication."""
    import oneflow as flow

    with flow.no_grad():
        part: tuple[slice, ...] | None = tuple(slice(None) for _ in tensor.shape)
        local = tensor
        if tensor.is_global:
            part = own_part(tensor.shape, tensor.placement.ranks, split_dims_of(tensor), get_rank())
            local = tensor.to_local()
        if part is not None and local.numel():
            local.copy_(flow.from_numpy(file.read(name, part)).to(local.dtype))


def whole_on_rank0(tensor: Any) -> np.ndarray | None:
    """Gather a tensor on rank 0; None on other ranks. Of local tensors, this is rank 0's. Collective.

    The result may share memory with `tensor`: use it before the next step.
    """
    if tensor.is_global:
        is_there = set(split_dims_of(tensor)) == {None} and 0 in np.asarray(tensor.placement.ranks)
        tensor = tensor.to_local() if is_there else tensor_to_rank0(tensor, device="cpu", to_local=True)
    return tensor.detach().numpy() if is_main_process() else None
