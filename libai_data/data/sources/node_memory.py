"""Memory that all processes of a user on one machine share by a name. The last process releases it.

The first process gets the name, which is a Unix socket's address outside the file system. It fills the memory and sends
the descriptor to later processes. A process that dies leaves nothing, and its name is free again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import socket
import threading
import time
import weakref
from typing import Callable

import numpy as np

from libai_data.errors import PeerError
from libai_data.launch.parent_pipe import keep_from_forks
from libai_data.mesh.peers.node_link import user_of

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_TRIES = 0.02
_SECONDS_UNTIL_TOLD = 5.0


class NodeMemory:
    """Bytes that this process reads, and others too.

    Args:
        descriptor: of memory that is filled; this object's own from now on.
        listener: the socket that has the memory's name, if this process took it.
    """

    def __init__(self, descriptor: int, listener: socket.socket | None = None) -> None:
        status = os.fstat(descriptor)
        self.number = status.st_ino
        """The memory's own, which tells it from others."""
        self.array: np.ndarray = np.frombuffer(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ), np.uint8)
        """The bytes, uint8 [n], read-only."""
        if listener is None:
            os.close(descriptor)
            return
        self._close_descriptor = weakref.finalize(self, os.close, descriptor)
        self._end_service = weakref.finalize(self, _close, listener)
        threading.Thread(target=_serve, args=(listener, descriptor), daemon=True, name="node-memory").start()


def shared_memory(name: str, fill: Callable[[int], None]) -> NodeMemory:
    """The memory of a name, filled by the first process.

    Args:
        name: says what the memory contains.
        fill: writes the content to a descriptor, at least a byte. Each process that waits gets its exceptions.

    Raises:
        PeerError: A process of another user has the name.
    """
    address = f"\0libai_data/memory/{os.getuid()}/{name}"
    began, told = time.monotonic(), False
    while True:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(address)
            listener.listen(256)
            break
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
        descriptor = _received(address)
        if descriptor is not None:
            return NodeMemory(descriptor)
        if not told and time.monotonic() - began > _SECONDS_UNTIL_TOLD:
            logger.warning(
                "Waiting for the process that has the socket %s, to load records into shared memory.", address[1:]
            )
            told = True
        time.sleep(_SECONDS_BETWEEN_TRIES)
    # A forked process would not answer, and would keep the name.
    keep_from_forks(listener)
    descriptor = os.memfd_create("libai_data_records", os.MFD_CLOEXEC)
    try:
        fill(descriptor)
    except BaseException:
        os.close(descriptor)
        _close(listener)
        raise
    return NodeMemory(descriptor, listener)


def _received(address: str) -> int | None:
    """A descriptor from the process that has the name, once the memory is filled; None if it does not give one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        try:
            end.connect(address)
        except OSError:
            return None
        if user_of(end) != os.getuid():
            raise PeerError(
                f"a process of user {user_of(end)} has the socket \\0{address[1:]} (see /proc/net/unix), which is "
                "for memory of this user; have it ended"
            )
        try:
            descriptors = socket.recv_fds(end, 1, 1)[1]
        except OSError:
            return None
        return descriptors[0] if descriptors else None


def _serve(listener: socket.socket, descriptor: int) -> None:
    while True:
        try:
            end, _ = listener.accept()
        except OSError:
            return  # Closed: the memory is not needed here any more.
        with contextlib.suppress(OSError), end:  # Whoever asked may be gone.
            if user_of(end) == os.getuid():
                socket.send_fds(end, [b"d"], [descriptor])


def _close(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits for others.
    listener.close()
