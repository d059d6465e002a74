"""Memory that all processes of a user on one machine share by a name, and that is gone with the last of them.

Who comes first takes the name, a Unix socket's address outside the file system, fills the memory, and hands its
descriptor to those who come later. A process that dies leaves nothing behind, and its name is free again.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from typing import Any, Callable

import numpy as np

from libai_data.errors import PeerError

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
_SECONDS_BETWEEN_TRIES = 0.02
_SECONDS_UNTIL_TOLD = 5.0
_ADDRESSES = 16
_listening: weakref.WeakSet[Any] = weakref.WeakSet()


def _let_go_in_forked_child() -> None:
    # It does not answer there, and would keep the name.
    for listener in list(_listening):
        listener.close()


os.register_at_fork(after_in_child=_let_go_in_forked_child)


class NodeMemory:
    """Bytes that this process reads, and others too.

    Args:
        descriptor: of memory that is filled; this object's own from now on.
        listener: the socket that has the memory's name, if this process took it.
    """

    def __init__(self, descriptor: int, listener: socket.socket | None = None) -> None:
        self.descriptor = descriptor
        size = os.fstat(descriptor).st_size
        self.array: np.ndarray = np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), np.uint8)
        """The bytes, uint8 [n], read-only."""
        self._close_descriptor = weakref.finalize(self, os.close, descriptor)
        if listener is not None:
            self._end_service = weakref.finalize(self, _close, listener)
            threading.Thread(target=_serve, args=(listener, descriptor), daemon=True, name="node-memory").start()

    @property
    def path(self) -> str:
        """Where processes of this user can open the memory while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @property
    def number(self) -> int:
        """The memory's own, which tells it from others."""
        return os.fstat(self.descriptor).st_ino


def shared_memory(name: str, fill: Callable[[int], None]) -> NodeMemory:
    """The memory of a name, filled by whoever comes first.

    Args:
        name: says what the memory holds.
        fill: writes it to a descriptor, at least a byte; what it raises, each process gets that tries.

    Raises:
        PeerError: Other users have taken all addresses for this name.
    """
    addresses = [f"\0libai_data/memory/{os.getuid()}/{name}/{number}" for number in range(_ADDRESSES)]
    began, refused, told = time.monotonic(), 0, False
    while addresses:
        address = addresses[0]
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(address)
            listener.listen(256)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            try:
                descriptor = _received(address)
            except PermissionError:
                del addresses[0]  # All processes of this user pass on to the next one.
                continue
            except ConnectionRefusedError:
                refused += 1
                if refused * _SECONDS_BETWEEN_TRIES > _SECONDS_UNTIL_TOLD:
                    del addresses[0]  # Nobody of this package takes an address and does not listen.
                    refused = 0
                descriptor = -1
            if descriptor >= 0:
                return NodeMemory(descriptor)
            if not told and time.monotonic() - began > _SECONDS_UNTIL_TOLD:
                logger.warning("Waiting for another process of this machine to load records into shared memory.")
                told = True
            time.sleep(_SECONDS_BETWEEN_TRIES)
            continue
        _listening.add(listener)
        descriptor = os.memfd_create("libai_data_records", os.MFD_CLOEXEC)
        try:
            fill(descriptor)
        except BaseException:
            os.close(descriptor)
            _close(listener)
            raise
        return NodeMemory(descriptor, listener)
    raise PeerError(
        f"processes of other users listen at all {_ADDRESSES} addresses for shared memory like \\0libai_data/memory/"
        f"{os.getuid()}/{name}/0 (see /proc/net/unix); have them ended"
    )


def opened_memory(path: str, number: int) -> NodeMemory | None:
    """The memory that another process has under a path, or None if it is not there any more."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(descriptor).st_ino != number:
        os.close(descriptor)
        return None
    return NodeMemory(descriptor)


def _received(address: str) -> int:
    """A descriptor from the process that has the name, once the memory is filled; -1 if it does not give one.

    Raises:
        PermissionError: The process is another user's.
        ConnectionRefusedError: It does not listen, or not yet.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        try:
            end.connect(address)
            if _user_of(end) != os.getuid():
                raise PermissionError("the process is another user's")
            _, ancillary, _, _ = end.recvmsg(1, socket.CMSG_SPACE(4))
        except (PermissionError, ConnectionRefusedError):
            raise
        except OSError:
            return -1
    for _, kind, data in ancillary:
        if kind == socket.SCM_RIGHTS:
            return int(array.array("i", data[:4])[0])
    return -1


def _serve(listener: socket.socket, descriptor: int) -> None:
    while True:
        try:
            end, _ = listener.accept()
        except OSError:
            return  # Closed: the memory is not needed here any more.
        with contextlib.suppress(OSError), end:  # Whoever asked may be gone.
            if _user_of(end) == os.getuid():
                end.sendmsg([b"d"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])


def _close(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits for others.
    listener.close()


def _user_of(end: socket.socket) -> int:
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
