"""Which part of each field's global tensor a rank of a mesh holds."""

from __future__ import annotations

from collections.abc import Sequence

from libai_data.errors import SchemaError
from libai_data.loader.schema import Layout
from libai_data.mesh.global_tensor import global_shape, split_dims
from libai_data.mesh.parallel_mesh import ParallelMesh

Part = tuple[slice, ...]


def whole_shape(rows: int, sample_shape: Sequence[int], layout: Layout, mesh: ParallelMesh) -> tuple[int, ...]:
    """Shape of the global tensor of one batch of all data-parallel ranks.

    Args:
        rows: of one data-parallel rank.
        sample_shape: without the batch dim.
        layout: of the field.
        mesh: the mesh.

    Raises:
        SchemaError: An axis does not divide the dim that it splits.
        MeshError: The mesh has no such layer.
    """
    mesh.layer_stage(layout.placement_idx)
    return global_shape((rows, *sample_shape), layout.sbp_list, mesh)


def part_of(shape: Sequence[int], layout: Layout, mesh: ParallelMesh, rank: int) -> Part | None:
    """What a rank holds of a global tensor: the data axis splits first, then the tensor axis what that left.

    Args:
        shape: of the global tensor; `whole_shape` has checked it.
        layout: of the field.
        mesh: the mesh; its rank is not looked at.
        rank: whose part.

    Returns:
        A slice for each dim; None where another pipeline stage holds the field.
    """
    data, tensor = mesh.data_parallel_size, mesh.tensor_parallel_size
    if rank // (data * tensor) != mesh.layer_stage(layout.placement_idx):
        return None
    bounds: list[tuple[int, int]] = [(0, size) for size in shape]
    axes = ((rank // tensor % data, data), (rank % tensor, tensor))
    for dim, (coordinate, size) in zip(split_dims(layout.sbp_list), axes):
        if dim is None:
            continue
        if dim >= len(bounds):
            raise SchemaError(f"the layout splits dim {dim} of a tensor of shape {tuple(shape)}")
        start, stop = bounds[dim]
        length = (stop - start) // size
        bounds[dim] = start + coordinate * length, start + (coordinate + 1) * length
    return tuple(slice(start, stop) for start, stop in bounds)


def spread(layout: Layout, mesh: ParallelMesh) -> tuple[int, int]:
    """How many different parts of a field there are, and how many ranks hold each.

    Args:
        layout: of the field.
        mesh: the mesh.
    """
    sizes = (mesh.data_parallel_size, mesh.tensor_parallel_size)
    cut = [size if dim is not None else 1 for dim, size in zip(split_dims(layout.sbp_list), sizes)]
    parts = cut[0] * cut[1]
    return parts, sizes[0] * sizes[1] // parts


def in_words(part: Part, shape: Sequence[int]) -> str:
    """A part as an index expression; dims that are whole are `:`, and left out at the end."""
    words = [":" if (cut.start, cut.stop) == (0, size) else f"{cut.start}:{cut.stop}" for cut, size in zip(part, shape)]
    while len(words) > 1 and words[-1] == ":":
        words.pop()
    return "all" if words in ([], [":"]) else f"[{', '.join(words)}]"
