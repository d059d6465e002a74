from __future__ import annotations

from collections.abc import Iterator

import pytest

from libai_data.mesh.current import set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    set_mesh(ParallelMesh(1, 1, 1))
    yield
    set_mesh(None)
