"""What the checks of one rank look at: its place in the job, its config, its dataset; each made when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from libai_data.config import try_get_key
from libai_data.doctor.job_rank import JobRank
from libai_data.engine.models import build_configured_tokenizer
from libai_data.engine.one_rank import OneRank, load_config, one_rank_loaders
from libai_data.global_batch.plan import READERS
from libai_data.inspection.mesh_of import mesh_of
from libai_data.mesh import set_mesh
from libai_data.parallel_mesh import ParallelMesh


class Examined:
    """What there is to look at on this rank.

    Args:
        job: this rank.
        config_file: path of the config.
        overrides: `key=value` each.
    """

    def __init__(self, job: JobRank, config_file: str, overrides: Sequence[str]) -> None:
        self.job = job
        self._config_file, self._overrides = config_file, overrides

    @cached_property
    def cfg(self) -> Any:
        """The config."""
        return load_config(self._config_file, self._overrides)

    @cached_property
    def mesh(self) -> ParallelMesh:
        """The mesh of the job, on one node: which ranks are on which is known when all have told."""
        return mesh_of(self.cfg, self.job.world_size)

    @property
    def readers(self) -> str:
        """Who reads."""
        return str(try_get_key(self.cfg, "dataloader.train.readers") or READERS[0])

    @property
    def reads(self) -> bool:
        """Whether this rank opens the dataset in the training."""
        if self.readers == "data_parallel":
            return True
        return self.job.rank == 0 if self.readers == "rank0" else self.job.local_rank == 0

    @cached_property
    def opened(self) -> OneRank:
        """The training's loader, on this process alone."""
        # By itself: get_mesh would ask OneFlow.
        set_mesh(ParallelMesh(1, 1, 1))
        return one_rank_loaders(self.cfg, self.mesh.data_parallel_size, tokenizer=build_configured_tokenizer(self.cfg))

    @property
    def dataset(self) -> Any:
        """The training's dataset; None of a loader that has none."""
        return getattr(self.opened.loaders[0], "dataset", None)
