"""This process as a rank of the job that is looked at, without joining it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from libai_data.errors import ConfigError
from libai_data.loader.worker import JOB_VARIABLES
from libai_data.peers.identity import SECRET_VARIABLE, job_key


class JobRank(NamedTuple):
    """A rank, as the launcher describes it.

    Args:
        rank: in the job.
        local_rank: on its node.
        world_size: ranks of the job.
        host: name or address of rank 0's machine.
        port: on which rank 0 listens.
        key: by which its ranks know each other.
        has_secret: whether nobody else can know the key.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    key: str = ""
    has_secret: bool = True

    @staticmethod
    def of(environment: Mapping[str, str]) -> JobRank:
        """What the environment says; one rank alone where it says nothing.

        Raises:
            ConfigError: A variable is missing or no number.
        """
        if "WORLD_SIZE" not in environment:
            return JobRank()
        numbers = []
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
            value = environment.get(name, "")
            if not value.isdigit():
                raise ConfigError(
                    f"{name} is {value!r} beside WORLD_SIZE={environment['WORLD_SIZE']}; start the ranks by "
                    "libai-data launch, or set it to a number"
                )
            numbers.append(int(value))
        rank, local_rank, world_size, port = numbers
        if not rank < world_size:
            raise ConfigError(f"RANK is {rank}; with WORLD_SIZE={world_size} it must be 0 to {world_size - 1}")
        host = environment.get("MASTER_ADDR", "127.0.0.1")
        has_secret = bool(environment.get(SECRET_VARIABLE))
        return JobRank(rank, local_rank, world_size, host, port, job_key(environment), has_secret)


def stay_out_of_the_job() -> None:
    """Forget the launcher's variables: a config may import OneFlow, which would join the job and wait for its ranks."""
    for name in JOB_VARIABLES:
        os.environ.pop(name, None)
