"""The fields of a step: their kind, their numbers, and the part that each rank of a mesh has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libai_data.commands.inspection.step_rows import StepRows
from libai_data.engine.checkpoint.placement import own_part
from libai_data.errors import MeshError, SchemaError
from libai_data.loader.schema import Layout
from libai_data.mesh.global_tensor import global_shape, split_dims
from libai_data.mesh.parallel_mesh import ParallelMesh

LABELS = ("labels", "label", "targets", "target", "lm_labels")
_NOT_TOKENS = ("mask", "position", "type", "segment", "length", "bool")
_CHANNELS = (1, 3, 4)
_LEAST_SIDE = 4
Part = tuple[slice, ...]


@dataclass(frozen=True)
class FieldReport:
    """One field over the rows that were read: its numbers, and its distribution over the mesh."""

    name: str
    dtype: str
    sample_shape: tuple[int, ...]  # without the batch dim; if the samples' shapes differ, the largest
    ragged: bool  # whether the samples' shapes differ
    # Shape of the global tensor of one batch; None if it cannot be made, for the reason in `problem`.
    shape: tuple[int, ...] | None
    low: float | None  # the smallest finite number; None if there is no finite number
    high: float | None  # the largest finite number
    mean: float | None
    nans: int
    infinities: int
    layout: Layout
    placement: str
    problem: str = ""


def field_report(name: str, rows: StepRows, mesh: ParallelMesh) -> FieldReport:
    """Report on a field of a step, on the mesh of the training."""
    values, layout = rows.values[name], rows.layouts[name]
    shapes = {array.shape for array in values}
    sample_shape = max(shapes, key=lambda shape: (int(np.prod(shape)), shape))
    shape, placement, problem = None, "", ""
    try:
        shape = whole_shape(rows.micro_batch_size, sample_shape, layout, mesh)
        stage = mesh.layer_stage(layout.placement_idx)
        ranks = mesh.ranks_of_stage(stage)
        words = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        placement = f"layer {layout.placement_idx}: stage {stage}, {words}"
    except (SchemaError, MeshError) as error:
        problem = str(error)
    dtype, numbers = str(values[0].dtype), _numbers(values)
    return FieldReport(name, dtype, sample_shape, len(shapes) > 1, shape, *numbers, layout, placement, problem)


def _numbers(values: Sequence[np.ndarray]) -> tuple[float | None, float | None, float | None, int, int]:
    """Smallest, largest and mean finite number, and counts of NaNs and infinities; complex numbers by magnitude."""
    flat = np.concatenate([value.reshape(-1) for value in values])
    flat = np.abs(flat) if flat.dtype.kind == "c" else flat
    finite, nans = flat[np.isfinite(flat)], int(np.isnan(flat).sum())
    infinities = flat.size - finite.size - nans
    if not finite.size:
        return None, None, None, nans, infinities
    return float(finite.min()), float(finite.max()), float(finite.mean(dtype=np.float64)), nans, infinities


def whole_shape(rows: int, sample_shape: Sequence[int], layout: Layout, mesh: ParallelMesh) -> tuple[int, ...]:
    """Shape of the global tensor of one batch of all data-parallel ranks, each with `rows` rows; or SchemaError."""
    mesh.layer_stage(layout.placement_idx)
    return global_shape((rows, *sample_shape), layout.sbp_list, mesh)


def part_of(shape: Sequence[int], layout: Layout, mesh: ParallelMesh, rank: int) -> Part | None:
    """The part of a global tensor on a rank: the data axis splits first, then the tensor axis splits each result.

    Returns a slice for each dim; None if the field is on another pipeline stage.
    """
    ranks = np.array(mesh.ranks_of_stage(mesh.layer_stage(layout.placement_idx)))
    grid = ranks.reshape(mesh.data_parallel_size, mesh.tensor_parallel_size)
    return own_part(shape, grid, split_dims(layout.sbp_list), rank)


def spread(layout: Layout, mesh: ParallelMesh) -> tuple[int, int]:
    """Count the different parts of a field, and the ranks that have each part."""
    sizes = (mesh.data_parallel_size, mesh.tensor_parallel_size)
    cut = [size if dim is not None else 1 for dim, size in zip(split_dims(layout.sbp_list), sizes)]
    parts = cut[0] * cut[1]
    return parts, sizes[0] * sizes[1] // parts


def in_words(part: Part, shape: Sequence[int]) -> str:
    """A part as an index expression. A dim that is not split is `:`; at the end of the expression it is left out."""
    words = [":" if (cut.start, cut.stop) == (0, size) else f"{cut.start}:{cut.stop}" for cut, size in zip(part, shape)]
    while len(words) > 1 and words[-1] == ":":
        words.pop()
    return "all" if words in ([], [":"]) else f"[{', '.join(words)}]"


def is_mask(name: str, value: np.ndarray) -> bool:
    """Whether a field of a sample is a mask: its name contains "mask", or its dtype is bool."""
    return value.ndim >= 1 and ("mask" in name.lower() or value.dtype == np.bool_)


def is_loss_mask(name: str, value: np.ndarray) -> bool:
    """Whether a field marks the tokens that the loss counts."""
    return is_mask(name, value) and value.ndim == 1 and "loss" in name.lower()


def is_padding_mask(name: str, value: np.ndarray) -> bool:
    """Whether a field marks the tokens that are not padding."""
    known = ("attention", "padding", "input", "pad")
    return is_mask(name, value) and value.ndim == 1 and any(word in name.lower() for word in known)


def is_tokens(name: str, value: np.ndarray) -> bool:
    """Whether a field contains token ids."""
    return value.ndim == 1 and value.dtype.kind in "iu" and not any(word in name.lower() for word in _NOT_TOKENS)


def is_class_label(name: str, value: np.ndarray) -> bool:
    """Whether a field is the label of a class."""
    return value.size == 1 and value.dtype.kind in "iu" and name.lower() in LABELS


def channels_at(shape: tuple) -> int | None:
    """The dim of the channels of a picture: 0 or 2 of three dims; -1 for a picture without channels; else None."""
    if len(shape) == 2 and min(shape) >= _LEAST_SIDE:
        return -1
    if len(shape) == 3:
        for dim, sides in ((0, shape[1:]), (2, shape[:2])):
            if shape[dim] in _CHANNELS and min(sides) >= 1:
                return dim
    return None


def is_picture(value: np.ndarray) -> bool:
    """Whether a field can be shown as a picture."""
    return value.size > 0 and value.dtype.kind in "biuf" and channels_at(value.shape) is not None
