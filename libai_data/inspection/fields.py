"""What a step's fields are: shape, dtype, range, mean, and how they lie on the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libai_data.errors import MeshError, SchemaError
from libai_data.inspection.field_parts import whole_shape
from libai_data.inspection.step_rows import StepRows
from libai_data.loader.schema import Layout
from libai_data.parallel_mesh import ParallelMesh


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
    """Least, largest and mean finite number, NaNs and infinities; row by row, so that no copy of all is made."""
    lows: list[float] = []
    highs: list[float] = []
    total, count, nans, infinities = 0.0, 0, 0, 0
    for array in values:
        numbers = np.abs(array) if array.dtype.kind == "c" else array
        if numbers.dtype.kind == "f":
            finite = numbers[np.isfinite(numbers)]
            nans += int(np.isnan(numbers).sum())
            infinities += int(np.isinf(numbers).sum())
        else:
            finite = numbers
        if finite.size:
            lows.append(float(finite.min()))
            highs.append(float(finite.max()))
            total += float(finite.sum(dtype=np.float64))
            count += finite.size
    if not count:
        return None, None, None, nans, infinities
    return min(lows), max(highs), total / count, nans, infinities
