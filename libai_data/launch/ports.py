"""Finds and checks the port of rank 0, to which all ranks connect, and checks that the machines differ."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from libai_data.errors import ConfigError

DEFAULT_PORT = 29500
# Below the ports that Linux gives to clients, so that no client takes the port before rank 0 listens.
FREE_PORTS = range(15000, 32000)
_ESTABLISHED, _LISTENING = "01", "0A"
_CREDENTIALS = struct.Struct("3i")
_MOST_CALLERS = 4096  # ranks of a machine that may connect; nobody accepts, so the backlog must have room for all


def check_host(name: str, host: str) -> None:
    """Raise a ConfigError if `host`, which the user gave as `name`, cannot be a name or address, such as '10.0..1'."""
    refused = ConfigError(f"{name} is {host!r}, which is no address and no name of a machine")
    if len(host.split()) > 1:  # as `hostname -I` prints
        raise refused
    try:
        host.encode("idna")  # as the functions of `socket` do
    except UnicodeError:
        raise refused from None


def listen(port: int, backlog: int = 1) -> socket.socket:
    """Listen on a TCP port of all addresses, with IPv6 if available; with 0, the system chooses it."""
    listener = bound(port)
    listener.listen(backlog)
    return listener


def bound(port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """A socket bound to a port of all addresses of this machine; an OSError if it is in use."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        found = None
        try:
            found = socket.socket(family, kind)
            if kind == socket.SOCK_STREAM:  # For UDP, this would let two sockets share the port.
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            found.bind((address, port))
            return found
        except OSError as error:
            if found is not None:
                found.close()
            problem = error  # No IPv6, or the port is in use; then binding to IPv4 fails too.
    raise problem


def free_port() -> int:
    """A TCP port on which no process of this machine listens; an OSError if none of 200 is free."""
    for port in random.SystemRandom().sample(FREE_PORTS, 200):
        with contextlib.suppress(ConfigError), reserve_port(port):
            return port
    raise OSError(f"no free port among 200 tried of {FREE_PORTS.start} to {FREE_PORTS.stop - 1}; give --master_port")


def reserve_port(port: int, holder: str = "launcher") -> socket.socket:
    """Reserve a port on this machine, against holders of the same kind (`holder`), until the returned socket is closed.

    Two launchers that start at the same moment both find the port free. OneFlow lets two jobs of one user share the
    port, so their ranks would join each other. So this raises ConfigError if the port is in use.
    """
    # The socket's name is free again when its process ends. Like the port, it belongs to the network namespace.
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    taker = f"another job's {holder}"
    try:
        reservation.bind(_reservation(port, holder))
        reservation.listen(_MOST_CALLERS)
        taker = "another program, such as rank 0 of another job"
        # Bind without listening; a launcher that waits for rank 0 would connect to a listening socket.
        bound(port).close()
    except OSError as error:
        reservation.close()
        if error.errno == errno.EMFILE:
            raise
        raise ConfigError(
            f"port {port} is in use on this machine, by {taker} ({error.strerror}); give each job its own "
            "--master_port (MASTER_PORT)"
        ) from error
    return reservation


def process_with_port(port: int, holder: str) -> int | None:
    """The id of the process that has reserved a port; None if there is none, and 0 if it is in another container."""
    return process_at(_reservation(port, holder))


def process_at(address: str) -> int | None:
    """The id of the process that listens at the address of a Unix socket; None and 0 as for `process_with_port`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(address)
        except OSError:
            return None
        return process_and_user_of(caller)[0]


def process_and_user_of(end: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end of a Unix socket; the process id is 0 for another container."""
    process, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return process, user


def _reservation(port: int, holder: str) -> str:
    return f"\0libai_data.launch/port/{port}/{holder}"


def refuse_one_machine(nnodes: int, node_rank: int, host: str | None) -> None:
    """Raise a ConfigError if two nodes would be on one machine, because OneFlow 0.9 computes wrong sums between them.

    `host` is the address or name of machine 0, and `node_rank` is the number of this machine.
    """
    if nnodes == 1:
        return
    if host is None:
        raise ConfigError(f"--nnodes is {nnodes}, but --master_addr is not given; give the address of machine 0")
    for address in _addresses_of(host):
        if ipaddress.ip_address(address).is_loopback or (node_rank > 0 and _is_own(address)):
            raise ConfigError(
                f"--master_addr {host} ({address}) is an address of this machine, and this is machine {node_rank} of "
                f"{nnodes}: OneFlow computes wrong sums when two nodes run on one machine. Start all ranks of a "
                "machine by one launcher (--nproc_per_node), and give an address of machine 0 that the others reach"
            )


def machines_connected_to(port: int) -> list[str]:
    """Addresses of other machines that are connected to a TCP port of this machine."""
    found = {_address_in_words(other.partition(":")[0]) for other in _others_at(port, _ESTABLISHED)}
    return sorted(each for each in found if not _is_of_this_machine(each))


def is_listened_on(port: int) -> bool:
    """Whether a process of this machine listens on a TCP port."""
    return any(True for _ in _others_at(port, _LISTENING))


def is_this_machine(host: str) -> bool:
    """Whether a name or address belongs to this machine."""
    return any(map(_is_of_this_machine, _addresses_of(host)))


def _others_at(port: int, state: str) -> Iterator[str]:
    """The other ends of the sockets in `state` at a TCP port of this machine, in the notation of /proc/net/tcp."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            own, other, found = line.split()[1:4]
            if found == state and int(own.rpartition(":")[2], 16) == port:
                yield other


def _is_of_this_machine(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback or _is_own(address)


def _address_in_words(packed: str) -> str:
    words = [bytes.fromhex(packed[begin : begin + 8])[::-1] for begin in range(0, len(packed), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address)


def _addresses_of(host: str) -> set[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:  # The rank that connects reports this error.
        return set()
    return {str(address[0]).partition("%")[0] for *_, address in found}


def _is_own(address: str) -> bool:
    """Whether packets to an address would have the same source address; no packet is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return False
        return str(probe.getsockname()[0]) == address
