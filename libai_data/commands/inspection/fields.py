"""What a step's fields are: shape, dtype, range, mean, and how they lie on the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libai_data.commands.inspection.field_parts import whole_shape
from libai_data.commands.inspection.step_rows import StepRows
from libai_data.errors import MeshError, SchemaError
from libai_data.loader.schema import Layout
from libai_data.mesh.parallel_mesh import ParallelMesh


@dataclass(frozen=True)
class FieldReport:
    """One field over the rows that were read.

    Args:
        name: the field's.
        dtype: numpy's name.
        sample_shape: without the batch dim; of ragged batches the longest.
        ragged: shapes differ from batch to batch.
        shape: of the global tensor of one batch; None if it cannot be made.
        low: the least finite number; None without any.
        high: the largest.
        mean: of the finite numbers.
        nans: how many numbers are not a number.
        infinities: how many are infinite.
        layout: SBP and layer.
        placement: stage and ranks, in words.
        problem: why the field cannot become a global tensor on this mesh.
    """

    name: str
    dtype: str
    sample_shape: tuple[int, ...]
    ragged: bool
    shape: tuple[int, ...] | None
    low: float | None
    high: float | None
    mean: float | None
    nans: int
    infinities: int
    layout: Layout
    placement: str
    problem: str = ""


def field_reports(rows: StepRows, mesh: ParallelMesh) -> dict[str, FieldReport]:
    """Report on each field.

    Args:
        rows: of a step.
        mesh: that they are for.
    """
    return {
        name: _report(name, values, rows.layouts[name], rows.micro_batch_size, mesh)
        for name, values in rows.values.items()
    }


def _report(
    name: str, values: Sequence[np.ndarray], layout: Layout, micro_batch_size: int, mesh: ParallelMesh
) -> FieldReport:
    shapes = {array.shape for array in values}
    sample_shape = max(shapes, key=lambda shape: (int(np.prod(shape)), shape))
    shape, placement, problem = None, "", ""
    try:
        shape = whole_shape(micro_batch_size, sample_shape, layout, mesh)
        stage = mesh.layer_stage(layout.placement_idx)
        ranks = mesh.ranks_of_stage(stage)
        placement = f"layer {layout.placement_idx}: stage {stage}, {_ranks_in_words(ranks)}"
    except (SchemaError, MeshError) as error:
        problem = str(error)
    low, high, mean, nans, infinities = _numbers(values)
    dtype = str(values[0].dtype)
    return FieldReport(
        name, dtype, sample_shape, len(shapes) > 1, shape, low, high, mean, nans, infinities, layout, placement, problem
    )


def _ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _numbers(values: Sequence[np.ndarray]) -> tuple[float | None, float | None, float | None, int, int]:
    """Least, largest and mean finite number, NaNs and infinities; of complex numbers their magnitudes."""
    flat = np.concatenate([value.reshape(-1) for value in values])
    flat = np.abs(flat) if flat.dtype.kind == "c" else flat
    finite, nans = flat[np.isfinite(flat)], int(np.isnan(flat).sum())
    infinities = flat.size - finite.size - nans
    if not finite.size:
        return None, None, None, nans, infinities
    return float(finite.min()), float(finite.max()), float(finite.mean(dtype=np.float64)), nans, infinities
