"""Memory with a name, which all processes of a user on one machine share. The last process releases it.

The first process binds the name, which is the address of a Unix socket outside the file system. It fills the memory and
sends the descriptor to later processes. If the process dies, the name is free again, and nothing is left.
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
from libai_data.mesh.peers.links import user_of

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_TRIES = 0.02
_SECONDS_UNTIL_WARNING = 5.0


class NodeMemory:
    """Read-only memory that this process shares with others.

    Args:
        descriptor: descriptor of the filled memory; this object closes it.
        listener: the socket with the memory's name, if this process has bound it.
    """

    def __init__(self, descriptor: int, listener: socket.socket | None = None) -> None:
        status = os.fstat(descriptor)
        self.number = status.st_ino
        """Inode number, which identifies the memory."""
        self.array: np.ndarray = np.frombuffer(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ), np.uint8)
        """The bytes, uint8 [n], read-only."""
        if listener is None:
            os.close(descriptor)
            return
        self._close_descriptor = weakref.finalize(self, os.close, descriptor)
        self._end_service = weakref.finalize(self, _close, listener)
        threading.Thread(target=_serve, args=(listener, descriptor), daemon=True, name="node-memory").start()


def shared_memory(name: str, fill: Callable[[int], None]) -> NodeMemory:
    """The memory with a name that identifies its content; the first process fills it. A PeerError if another user has
    the name.

    `fill` writes the content to a descriptor, at least one byte. If it raises, the next process calls its own.
    """
    address = f"\0libai_data/memory/{os.getuid()}/{name}"
    began, has_warned = time.monotonic(), False
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
        if not has_warned and time.monotonic() - began > _SECONDS_UNTIL_WARNING:
            logger.warning(
                "Waiting for the process that has the socket %s, to load records into shared memory.", address[1:]
            )
            has_warned = True
        time.sleep(_SECONDS_BETWEEN_TRIES)
    # A forked process with this socket would keep the name, but would not answer.
    keep_from_forks(listener)
    listener.settimeout(None)  # The user may have called `socket.setdefaulttimeout`.
    descriptor = os.memfd_create("libai_data_records", os.MFD_CLOEXEC)
    try:
        fill(descriptor)
    except BaseException:
        os.close(descriptor)
        _close(listener)
        raise
    return NodeMemory(descriptor, listener)


def _received(address: str) -> int | None:
    """Receive the descriptor from the process with the name, after it filled the memory; None if it sends none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        try:
            end.connect(address)
        except OSError:
            return None
        if user_of(end) != os.getuid():
            raise PeerError(
                f"a process of user {user_of(end)} has the socket \\0{address[1:]} (see /proc/net/unix), which this "
                "user needs for shared memory; end that process"
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
        with contextlib.suppress(OSError), end:  # The process that connected may have ended.
            if user_of(end) == os.getuid():
                socket.send_fds(end, [b"d"], [descriptor])


def _close(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits in `accept`.
    listener.close()
