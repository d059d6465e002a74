"""The mesh that a config asks for, without any rank having been started."""

from __future__ import annotations

from typing import Any

from libai_data.config import try_get_key
from libai_data.errors import ConfigError
from libai_data.mesh.parallel_mesh import SIZE_KEYS, ParallelMesh


def mesh_of(cfg: Any, ranks: int | None = None, nodes: int = 1) -> ParallelMesh:
    """Build the mesh of `train.dist`.

    Args:
        cfg: the whole config.
        ranks: that would be started; by default as few as `train.dist` allows.
        nodes: that they would be on.

    Raises:
        ConfigError: A key of `train.dist` is unknown or impossible.
        MeshError: The sizes do not fit the ranks.
    """
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks is {ranks}; it must be at least 1")
    dist = try_get_key(cfg, "train.dist", default={})
    if ranks is None:
        ranks = 1
        for key in SIZE_KEYS:
            size = dist.get(key)
            # What is no number is named by from_config.
            ranks *= size if isinstance(size, int) and size > 0 else 1
    return ParallelMesh.from_config(dist, world_size=ranks, num_nodes=nodes, gpu_available=True)
