"""Environment variables of a job: its key, its machine, and how long to wait for other ranks."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import sys
from collections.abc import Mapping
from functools import lru_cache

from libai_data.errors import ConfigError, nearest

logger = logging.getLogger(__name__)

_PREFIX = "LIBAI_DATA_"
VARIABLES = (
    *("CACHE_DIR", "CACHE_SIZE", "FILE_IDENTITY", "STORAGE_ATTEMPTS", "SECONDS_TO_JOIN", "SECONDS_TO_MEET"),
    *("JOB", "JOB_SECRET", "JOINING_PIPE", "RESTARTED"),
)
"""The environment variables that this package reads, without their prefix."""

SECRET_VARIABLE = "LIBAI_DATA_JOB_SECRET"
"""A secret that only the ranks of one job know. The launcher chooses it, also for all machines of a hostfile. If you
start ranks in another way, set the same random words on all machines."""


SECONDS_TO_JOIN_VARIABLE = "LIBAI_DATA_SECONDS_TO_JOIN"


def job_key(environment: Mapping[str, str] = os.environ) -> str:
    """The key of this job, which differs from other jobs' keys: the job's secret, or else the address of rank 0."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    return environment.get(SECRET_VARIABLE) or " ".join(environment.get(name, "") for name in names)


def job_id(environment: Mapping[str, str] = os.environ) -> str:
    """A name of this job that does not reveal its secret."""
    return proof(job_key(environment), "id", environment.get("WORLD_SIZE", ""))[:12]


def proof(key: str, *said: object) -> str:
    """An HMAC-SHA256 of `said`, which shows that its sender knows the key."""
    return hmac.new(key.encode(), repr(said).encode(), hashlib.sha256).hexdigest()


def rank_numbers(environment: Mapping[str, str] = os.environ) -> dict[str, int]:
    """WORLD_SIZE, RANK, LOCAL_RANK and MASTER_PORT of a rank; a ConfigError names one with which OneFlow would hang."""
    found: dict[str, int] = {}
    for name, least in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0), ("MASTER_PORT", 1)):
        most = {"WORLD_SIZE": 2**31 - 1, "MASTER_PORT": 2**16 - 1}.get(name) or found["WORLD_SIZE"] - 1
        value = environment.get(name, "")
        number = int(value) if re.fullmatch("[0-9]{1,10}", value) else -1
        if not least <= number <= most:
            other = "" if name == "WORLD_SIZE" else f" although WORLD_SIZE is {found['WORLD_SIZE']}"
            raise ConfigError(
                f"{name} is {value!r}{other}; start the ranks by libai-data launch, or set {name} to a number from "
                f"{least} to {most}"
            )
        found[name] = number
    return found


def machine() -> str:
    """A name of this machine and its network namespace, because OneFlow counts each namespace as a node."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            booted = file.read().strip()
        return f"{booted} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return os.uname().nodename


def mistyped_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """What to say of variables that nothing reads, and whose names are nearly those of variables of this package."""
    words = {name: name[len(_PREFIX) :] for name in environment if name.startswith(_PREFIX)}
    found = {name: nearest(word, VARIABLES) for name, word in words.items() if word not in VARIABLES}
    return [
        f"The environment has {name}, which nothing reads.{hint.replace(chr(39), chr(39) + _PREFIX, 1)}"
        for name, hint in found.items()
        if hint
    ]


def seconds_to_join() -> float:
    """How many seconds ranks wait for each other to start: LIBAI_DATA_SECONDS_TO_JOIN, by default 600."""
    return seconds_from_environment(SECONDS_TO_JOIN_VARIABLE, 600.0)


@lru_cache(maxsize=1)
def warn_of_mistyped_variables() -> None:
    """Log what `mistyped_variables` finds, once in a process, and of several ranks on rank 0 only."""
    # While the program ends, nothing more can be imported.
    if os.environ.get("RANK") in (None, "0", "-1") and not sys.is_finalizing():
        for warning in mistyped_variables():
            logger.warning(warning)


def seconds_from_environment(variable: str, default: float) -> float:
    """The seconds above 0 of an environment variable, or `default`; at most three years, as locks wait no longer."""
    value = os.environ.get(variable, str(default))
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"{variable} is {value!r}; it must be a number of seconds above 0")
    return min(seconds, 1e8)
