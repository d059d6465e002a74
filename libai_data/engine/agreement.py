"""Whether all ranks run the same versions of packages, the same code of this package, and the same config.

The ranks compare these once, before they build anything. The error names each difference, and the ranks that differ.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, ListConfig, OmegaConf

import libai_data
from libai_data.config import try_get_key
from libai_data.delivery.gather import digest_of, gather_words
from libai_data.delivery.read_plan import ReadPlan
from libai_data.delivery.same_values import differences, flat_text
from libai_data.errors import ConfigError, nearest
from libai_data.mesh.current import broadcast_py_object, get_mesh, is_main_process
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.mesh.peers.same_job import hash_of_text, warn_of_hash_seeds

_ABSENT = "absent"
_LOW = 0xFFFFFFFF


def needed_versions() -> dict[str, str]:
    """Versions of Python, of the packages that this package requires, and of its own code."""
    versions = {"python": platform.python_version(), "libai_data": own_version()}
    for requirement in _requirements():
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if name is not None and "extra ==" not in requirement:
            versions[name[0]] = _ABSENT
            with suppress(importlib.metadata.PackageNotFoundError):
                versions[name[0]] = importlib.metadata.version(name[0])
    return versions


def own_version() -> str:
    """This package's version, and a digest of its code."""
    digest = hashlib.blake2b(digest_size=4)
    root = Path(libai_data.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return f"{libai_data.__version__} (code {digest.hexdigest()})"


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("libai_data") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return ["oneflow", "numpy"]


def config_values(cfg: Any) -> dict[str, str]:
    """The values of a config by their dotted keys, as text that is the same in every process.

    Interpolations are not resolved. The keys in `train.may_differ` are left out.
    """
    plain = OmegaConf.to_container(cfg, resolve=False) if isinstance(cfg, (DictConfig, ListConfig)) else cfg
    values = dict(flat_text("", plain))
    allowed = try_get_key(cfg, "train.may_differ") or ()
    for key in allowed:
        if not any(f"{name}.".startswith(f"{key}.") for name in values):
            raise ConfigError(f"train.may_differ names {key!r}, which the config lacks.{nearest(key, values)}")
    prefixes = tuple(f"{key}." for key in allowed)
    return {name: value for name, value in values.items() if not f"{name}.".startswith(prefixes)}


def hash_of_values(values: Mapping[str, str]) -> str:
    """A short hash of a config's values."""
    return f"{digest_of(json.dumps(values, sort_keys=True).encode()):016x}"


def check_same_start(cfg: Any) -> None:
    """Compare versions and config between all ranks; a ConfigError names the differences. Collective."""
    world_size = get_mesh().world_size
    if world_size > 1:
        own = {"version": needed_versions(), "config": config_values(cfg)}
        digest = digest_of(json.dumps(own, sort_keys=True).encode())
        words = gather_words(np.array([digest, hash_of_text() & _LOW]))
        if is_main_process():  # On the console, the other ranks show only errors.
            warn_of_hash_seeds(np.flatnonzero(words[:, 1] != words[0, 1]).tolist())
        if len(np.unique(words[:, 0])) > 1:
            raise ConfigError(_problem([broadcast_py_object(own, src=rank) for rank in range(world_size)]))


def _problem(of_each_rank: Sequence[Mapping[str, Mapping[str, str]]]) -> str:
    found = [
        f"the {what} of {difference}"
        for what in ("version", "config")
        for difference in differences({rank: each[what] for rank, each in enumerate(of_each_rank)})
    ]
    return (
        "the ranks do not run the same: "
        + "; ".join(found)
        + ". Start all of them with the same packages, code, config file and overrides; name keys that differ "
        "on purpose, such as a path, in train.may_differ"
    )


def mesh_warnings(mesh: ParallelMesh) -> list[str]:
    """Warnings about a mesh that fits its nodes badly."""
    width = mesh.tensor_parallel_size
    if mesh.num_nodes == 1 or width == 1:
        return []
    plan = ReadPlan(mesh, "every_rank")
    spanning = [
        first for first in range(0, mesh.world_size, width) if plan.node_of(first) != plan.node_of(first + width - 1)
    ]
    if not spanning:
        return []
    first, last = spanning[0], spanning[0] + width - 1
    return [
        f"{len(spanning)} tensor-parallel group(s) span nodes, such as ranks {first} to {last} on nodes "
        f"{plan.node_of(first)} to {plan.node_of(last)}: each layer then waits for the network several times a step. "
        f"Let train.dist.tensor_parallel_size ({width}) divide the {mesh.ranks_per_node} ranks of a node."
    ]
