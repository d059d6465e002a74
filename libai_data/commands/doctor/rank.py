"""This process as a rank of the job that the doctor checks, and the objects that the checks use. It joins no job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from libai_data.commands.one_rank import OneRank, mesh_of, one_rank_loaders
from libai_data.config import try_get_key
from libai_data.config.lazy_config import load_config
from libai_data.delivery.read_plan import READERS, read_mode
from libai_data.engine.models import build_configured_tokenizer
from libai_data.iterables.iterable_loader import indexed_dataset_of
from libai_data.launch.job_environment import SECRET_VARIABLE, job_key, rank_numbers
from libai_data.launch.ports import check_host
from libai_data.mesh.current import set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh


class JobRank(NamedTuple):
    """A rank as the launcher's variables describe it, and rank 0's address. With `has_secret`, `key` is a secret."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    key: str = ""
    has_secret: bool = True

    @staticmethod
    def of(environment: Mapping[str, str]) -> JobRank:
        """Read the launcher's variables, or raise ConfigError; without WORLD_SIZE, the job has one rank."""
        if "WORLD_SIZE" not in environment:
            return JobRank()
        world_size, rank, local_rank, port = rank_numbers(environment).values()
        host = environment.get("MASTER_ADDR", "127.0.0.1")
        check_host("MASTER_ADDR", host)
        has_secret = bool(environment.get(SECRET_VARIABLE))
        return JobRank(rank, local_rank, world_size, host, port, job_key(environment), has_secret)


class Examined:
    """The config, mesh and dataset of this rank, for the checks. Each is built at its first use."""

    def __init__(self, job: JobRank, config_file: str, overrides: Sequence[str]) -> None:
        self.job = job
        self._config_file, self._overrides = config_file, overrides

    @cached_property
    def cfg(self) -> Any:
        return load_config(self._config_file, self._overrides)

    @cached_property
    def mesh(self) -> ParallelMesh:
        """The mesh of the job, as if on one node. Only rank 0 learns the nodes, from the reports of all ranks."""
        return mesh_of(self.cfg, self.job.world_size)

    @property
    def readers(self) -> str:
        return read_mode(try_get_key(self.cfg, "dataloader.train.readers") or READERS[0])

    @property
    def reads(self) -> bool:
        """Whether this rank reads samples in the training."""
        if self.readers == "every_rank":
            return True
        return self.job.rank == 0 if self.readers == "rank0" else self.job.local_rank == 0

    @cached_property
    def opened(self) -> OneRank:
        """The training's loader, for this process alone."""
        # Without this, get_mesh would ask OneFlow for the mesh.
        set_mesh(ParallelMesh(1, 1, 1))
        return one_rank_loaders(self.cfg, self.mesh.data_parallel_size, tokenizer=build_configured_tokenizer(self.cfg))

    @property
    def dataset(self) -> Any:
        """The training's dataset; None if its loader has no dataset."""
        return indexed_dataset_of(self.opened.loaders[0])
