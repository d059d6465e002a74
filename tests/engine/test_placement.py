from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libai_data.engine.checkpoint.placement import own_part, split_range

dims = st.one_of(st.none(), st.integers(0, 1))


@given(st.integers(0, 50), st.integers(1, 8))
def test_parts_follow_each_other_and_differ_by_one_at_most(length: int, parts: int) -> None:
    ranges = [split_range(length, parts, part) for part in range(parts)]
    assert [begin for begin, _ in ranges] == [0, *[end for _, end in ranges[:-1]]]
    assert ranges[-1][1] == length
    sizes = [end - begin for begin, end in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(dims, dims),
)
def test_parts_of_all_ranks_cover_the_tensor_as_often_as_it_is_broadcast(
    shape: tuple[int, int], mesh: tuple[int, int], splits: tuple[int | None, int | None]
) -> None:
    ranks = np.arange(mesh[0] * mesh[1]).reshape(mesh) + 5
    covered = np.zeros(shape, int)
    for rank in ranks.ravel():
        part = own_part(shape, ranks, splits, int(rank))
        assert part is not None
        covered[part] += 1
    copies = np.prod([size for size, dim in zip(mesh, splits) if dim is None])
    assert (covered == copies).all()
    assert own_part(shape, ranks, splits, 4) is None
