"""What the drawing says a rank holds is what it holds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libai_data.commands.inspection.fields import in_words, part_of, spread, whole_shape
from libai_data.loader.schema import Layout
from libai_data.mesh.parallel_mesh import ParallelMesh

SBP = ("broadcast", "split_0", "split_1")
MESHES = st.builds(ParallelMesh, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))


@given(MESHES, st.sampled_from(SBP), st.sampled_from(SBP), st.sampled_from([0, -1]))
def test_the_ranks_of_a_stage_hold_each_number_equally_often(
    mesh: ParallelMesh, data: str, tensor: str, layer: int
) -> None:
    layout = Layout((data, tensor), layer)
    shape = whole_shape(36, (36,), layout, mesh)
    held = np.zeros(shape, dtype=int)
    for rank in range(mesh.world_size):
        part = part_of(shape, layout, mesh, rank)
        assert (part is None) == (rank not in mesh.layer_ranks(layer))
        if part is not None:
            held[part] += 1
    copies = (mesh.data_parallel_size if data == "broadcast" else 1) * (
        mesh.tensor_parallel_size if tensor == "broadcast" else 1
    )
    assert (held == copies).all()
    parts = [part_of(shape, layout, mesh, rank) for rank in mesh.layer_ranks(layer)]
    assert spread(layout, mesh) == (len(set(map(str, parts))), copies)


def test_the_axes_cut_what_they_split_and_parts_are_written_as_one_would_index_them() -> None:
    layout = Layout(("split_0", "split_1"))
    held = [part_of((6, 8), layout, ParallelMesh(2, 2, 1), rank) for rank in range(4)]
    rows, columns = (slice(0, 3), slice(3, 6)), (slice(0, 4), slice(4, 8))
    assert held == [(each, other) for each in rows for other in columns]
    assert in_words((slice(0, 4), slice(0, 3)), (4, 3)) == "all"
    assert in_words((slice(0, 2), slice(0, 3)), (4, 3)) == "[0:2]"
    assert in_words((slice(0, 4), slice(1, 2)), (4, 3)) == "[:, 1:2]"
