"""The port on which the ranks of a job find each other."""

from __future__ import annotations

import random
import socket

DEFAULT_PORT = 29500
# Below the ports that Linux hands out to clients, so that none of them takes it before rank 0 listens.
FREE_PORTS = range(15000, 32000)


def free_port() -> int:
    """Return a TCP port that nothing on this machine listens on."""
    for port in random.SystemRandom().sample(FREE_PORTS, 200):
        with socket.socket() as candidate:
            try:
                candidate.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among 200 tried of {FREE_PORTS.start} to {FREE_PORTS.stop - 1}; give --master_port")
