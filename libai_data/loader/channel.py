"""Channels: messages between the trainer's process and one worker, whole or not at all."""

from __future__ import annotations

import array
import mmap
import os
import pickle
import socket
from typing import Any, Optional, Tuple

_INLINE = 64 * 1024
_MESSAGE = 2 * _INLINE


class Channel:
    """One end of a pair of connected sockets. Only ends of the same program may talk over it: messages are pickles.

    Args:
        end: a Unix socket of type SOCK_SEQPACKET.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @staticmethod
    def pair() -> Tuple[Channel, Channel]:
        """Two connected ends."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Channel(left), Channel(right)

    def fileno(self) -> int:
        """Descriptor, for polling; readable when a message waits or the other end is gone."""
        return self._end.fileno()

    def send(self, message: Any) -> None:
        """Send a picklable message of any size.

        Raises:
            OSError: The other end is gone.
        """
        packed = pickle.dumps(message, protocol=5)
        if len(packed) <= _INLINE:
            self._end.sendall(b"i" + packed)
            return
        # Too long for a socket's buffer: it travels as memory, of which only the descriptor is sent.
        descriptor = os.memfd_create("libai_data_message", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(packed)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            self._end.sendmsg([b"m"], rights)
        finally:
            os.close(descriptor)

    def receive(self) -> Any:
        """Wait for a message.

        Raises:
            EOFError: The other end is gone, and nothing of it waits any more.
        """
        try:
            data, ancillary, _, _ = self._end.recvmsg(_MESSAGE, socket.CMSG_SPACE(4))
        except ConnectionResetError as error:
            raise EOFError("the other end was reset") from error
        if not data:
            raise EOFError("the other end is closed")
        descriptor = _descriptor_of(ancillary)
        if descriptor is None:
            return pickle.loads(memoryview(data)[1:])
        try:
            with mmap.mmap(descriptor, 0) as packed:
                return pickle.loads(packed)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close this end; the other one's `receive` raises EOFError."""
        self._end.close()


def _descriptor_of(ancillary: Any) -> Optional[int]:
    for _, kind, data in ancillary:
        if kind == socket.SCM_RIGHTS:
            return int(array.array("i", data[:4])[0])
    return None
