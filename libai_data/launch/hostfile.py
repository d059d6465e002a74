"""Hostfiles: one machine a line, as DeepSpeed and Open MPI write them.

node-a              # a name or address that ssh knows
me@10.0.0.2 slots=8
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from libai_data.errors import ConfigError


class Host(NamedTuple):
    """A machine.

    Args:
        target: what ssh is given, "name" or "user@name".
    """

    target: str

    @property
    def address(self) -> str:
        """Its name or address, without a user."""
        return self.target.rpartition("@")[2]


def read_hostfile(path: str, ranks_per_node: int) -> list[Host]:
    """Read the machines of a hostfile.

    Args:
        path: of the file.
        ranks_per_node: that will be started on each; where a line has `slots=N`, N must be that.

    Raises:
        ConfigError: It cannot be read, names no machine or one twice, or a line is no machine; names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} cannot be read: {error}") from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        target, *slots = words
        if target.startswith("-") or len(slots) > 1 or (slots and not slots[0].startswith("slots=")):
            raise ConfigError(f"{path}, line {number} is {line.strip()!r}; it must be 'HOST' or 'HOST slots=N'")
        if slots and slots[0] != f"slots={ranks_per_node}":
            raise ConfigError(
                f"{path}, line {number} has {slots[0]}, but --nproc_per_node is {ranks_per_node}: each machine gets "
                "the same number of ranks"
            )
        if target in (host.target for host in hosts):
            raise ConfigError(f"{path}, line {number} names {target} again; ranks of one machine are one line")
        hosts.append(Host(target))
    if not hosts:
        raise ConfigError(f"{path} names no machine; write one a line")
    return hosts
