"""Make a global tensor of the ranks' local tensors, and send data only if the layout requires it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from libai_data.errors import MeshError, SchemaError
from libai_data.mesh.arrays import as_flow_tensor
from libai_data.mesh.current import get_layer_placement, get_mesh, get_nd_sbp, mesh_of_libai, moved
from libai_data.mesh.parallel_mesh import SIZE_KEYS, ParallelMesh

_AXES = ("data", "tensor")


def split_dims(sbp_list: Sequence[str]) -> tuple[int | None, int | None]:
    """Parse a field's signature into the dims that the data and the tensor axis split; None for broadcast.

    `sbp_list` has "split_<dim>" or "broadcast" for each axis. Otherwise this function raises SchemaError.
    """
    if isinstance(sbp_list, str) or not isinstance(sbp_list, Sequence) or len(sbp_list) != len(_AXES):
        raise SchemaError(
            f"sbp_list is {sbp_list!r}; it needs one entry for each of the axes {_AXES}, as ['split_0', 'broadcast']"
        )
    data, tensor = (_split_dim(entry, axis) for entry, axis in zip(sbp_list, _AXES))
    return data, tensor


def _split_dim(entry: str, axis: str) -> int | None:
    if entry == "broadcast":
        return None
    kind, _, dim = str(entry).partition("_")
    if kind == "split" and dim.isdigit():
        return int(dim)
    raise SchemaError(
        f"sbp_list has {entry!r} for the {axis} axis; inputs can be 'broadcast' or 'split_<dim>', such as 'split_0'"
    )


def nd_sbp(sbp_list: Sequence[str]) -> list[Any]:
    """OneFlow's signature for `sbp_list` on the current mesh, without the axes of size 1."""
    import oneflow as flow

    return get_nd_sbp([flow.sbp.broadcast if dim is None else flow.sbp.split(dim) for dim in split_dims(sbp_list)])


def global_shape(shape: Sequence[int], sbp_list: Sequence[str], mesh: ParallelMesh) -> tuple[int, ...]:
    """Shape of the global tensor of data-parallel shards of shape `shape`; a SchemaError if it cannot be split."""
    if not shape:
        raise SchemaError(
            "the tensor has no batch dim; stack samples into a batch first, or repeat a number for each row"
        )
    whole = (shape[0] * mesh.data_parallel_size, *shape[1:])
    sizes = (mesh.data_parallel_size, mesh.tensor_parallel_size)
    parts = [1] * len(whole)
    for axis, dim, size in zip(_AXES, split_dims(sbp_list), sizes):
        if dim is None:
            continue
        if dim >= len(whole):
            raise SchemaError(f"the {axis} axis splits dim {dim}, but the tensor has {len(whole)} dims: {whole}")
        parts[dim] *= size
        if whole[dim] % parts[dim]:
            raise SchemaError(
                f"dim {dim} of size {whole[dim]} cannot be split evenly into {parts[dim]} parts (the {axis} axis has "
                f"size {size}); choose a size that is a multiple of {parts[dim]}, or broadcast over this axis"
            )
    return whole


def local_to_global(
    local: Any,
    sbp_list: Sequence[str],
    placement_idx: int = 0,
    device_type: str | None = None,
    is_part: bool = False,
) -> Any:
    """Make a global tensor from the data-parallel shards `local` of all ranks.

    Ranks that differ only in the tensor or pipeline coordinate must pass equal shards. Each rank fills its own part.
    Data is sent only if the data axis is not split over dim 0: then ranks need rows that they did not read.

    Args:
        local: numpy array or OneFlow tensor [rows of one data-parallel rank, ...]; a global tensor is moved to the
            layout instead.
        is_part: `local` has only this rank's part of the dim that the tensor axis splits.

    Returns:
        A global OneFlow tensor [rows of all data-parallel ranks, ...].

    Raises:
        SchemaError: The layout does not fit the shape or the mesh, or OneFlow lacks the dtype.
        MeshError: LiBai, imported after the mesh of this job was set, has made another mesh.
    """
    tensor = as_flow_tensor(local)
    if tensor.is_global:
        return moved(tensor, get_layer_placement(placement_idx, device_type), nd_sbp(sbp_list))
    plan = _plan(get_mesh(), tuple(tensor.shape), tuple(map(str, sbp_list)), placement_idx, device_type, is_part)
    if plan.narrow is not None:
        tensor = tensor.narrow(*plan.narrow)
    whole = _fill(tensor, plan)
    return whole if plan.moved_to is None else moved(whole, plan.placement, plan.moved_to)


@dataclass(frozen=True)
class _Plan:
    """How the local tensors of a field become global tensors."""

    shape: tuple[int, ...]
    placement: Any
    device_type: str
    sbp: list[Any]  # SBP with which each rank fills its own part
    uses_part: bool  # OneFlow uses the local part as it is
    # Dim, start and length of the rank's part of its shard; None if the part is the whole shard.
    narrow: tuple[int, int, int] | None = None
    moved_to: list[Any] | None = None  # sbp to which OneFlow moves the data afterwards; None if no move is needed


# Cached: layouts repeat in each batch, and making a placement is slower than making the global tensor.
@lru_cache(maxsize=512)
def _plan(
    mesh: ParallelMesh,
    shape: tuple[int, ...],
    sbp_list: tuple[str, ...],
    placement_idx: int,
    device_type: str | None,
    is_part: bool,
) -> _Plan:
    own, libais = ([getattr(each, key) for key in SIZE_KEYS] for each in (mesh, mesh_of_libai() or mesh))
    if own != libais:
        raise MeshError(
            f"LiBai's layers use the mesh {libais} (data, tensor, pipeline), but this job has {own}: import LiBai "
            "before init, which gives LiBai the mesh of the job"
        )
    placement = get_layer_placement(placement_idx, device_type)
    data_dim, tensor_dim = split_dims(sbp_list)
    shard = list(shape)
    if is_part and tensor_dim is not None:
        shard[tensor_dim] *= mesh.tensor_parallel_size
    whole, sbp = global_shape(shard, sbp_list, mesh), nd_sbp(sbp_list)
    narrow = moved_to = None
    if data_dim != 0 and mesh.data_parallel_size > 1:
        moved_to, sbp = sbp, nd_sbp(("split_0", sbp_list[1] if is_part else "broadcast"))
    elif tensor_dim is not None and mesh.tensor_parallel_size > 1 and not is_part:
        length = shard[tensor_dim] // mesh.tensor_parallel_size
        narrow = (tensor_dim, mesh.tensor_parallel_rank * length, length)
    # If all axes split, `to_global` without the metadata check uses the local part as it is. If an axis broadcasts,
    # `to_global` would send rank 0's bytes, although each rank already has the same bytes.
    uses_part = np.size(placement.ranks) == 1 or all("split" in str(entry) for entry in sbp)
    return _Plan(whole, placement, str(placement.type), sbp, uses_part, narrow, moved_to)


def _packed(tensor: Any) -> Any:
    """The tensor, contiguous and at the beginning of its memory; copied if necessary.

    When OneFlow 0.9 changes the SBP of a global tensor on two axes, it reads the local part from the beginning of the
    memory, even if the part is a view with an offset.
    """
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.clone() if tensor.storage_offset() else tensor


def _fill(part: Any, plan: _Plan) -> Any:
    """Make the global tensor whose part on this rank is `part`, without communication."""
    if plan.uses_part:
        on_device = part.to(plan.device_type) if plan.device_type != "cpu" or part.is_cuda else part
        return _packed(on_device).to_global(placement=plan.placement, sbp=plan.sbp, check_meta=False)
    import oneflow as flow

    whole = flow.empty(plan.shape, dtype=part.dtype, placement=plan.placement, sbp=plan.sbp)
    own = whole.to_local()
    if own.numel():
        own.copy_(_packed(part))
    return whole
