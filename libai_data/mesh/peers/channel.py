"""Channels: messages between two processes of one program, such as the trainer and a worker."""

from __future__ import annotations

import array
import mmap
import os
import pickle
import select
import socket
from contextlib import suppress
from functools import partial
from typing import Any

from libai_data.mesh.peers.pickling import pickled

_INLINE = 64 * 1024
_MESSAGE = 2 * _INLINE


class Channel:
    """One end of a pair of connected SOCK_SEQPACKET sockets. Messages are pickles, complete or not received at all."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)  # The user may have called `socket.setdefaulttimeout`.
        self._end = end

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Two connected ends."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Channel(left), Channel(right)

    def fileno(self) -> int:
        """Descriptor for polling; readable if a message has arrived or the other end is closed."""
        return self._end.fileno()

    def send(self, message: Any) -> None:
        """Send a picklable message of any size. Raises OSError if the other end is closed."""
        packed = pickled(message)
        if len(packed) <= _INLINE:
            self._end.sendall(b"i" + packed)
            return
        # The message is too long for a socket's buffer, so it is put into memory, and only a descriptor is sent.
        descriptor = os.memfd_create("libai_data_message", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(packed)
            self.send_descriptor(descriptor)
        finally:
            os.close(descriptor)

    def send_descriptor(self, descriptor: int) -> None:
        """Send an open file; the other end gets its own descriptor. Raises OSError if the other end is closed."""
        self._end.sendmsg([b"d"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])

    def receive(self) -> Any:
        """Wait for a message. Raises EOFError if the other end is closed and all its messages were received."""
        data, descriptor = self._receive()
        if descriptor is None:
            return pickle.loads(memoryview(data)[1:])
        try:
            with mmap.mmap(descriptor, 0) as packed:
                return pickle.loads(packed)
        finally:
            os.close(descriptor)

    def receive_descriptor(self) -> int:
        """Wait for an open file from the other end; returns its descriptor. Raises EOFError if something else comes."""
        _, descriptor = self._receive()
        if descriptor is None:
            raise EOFError("the other end sent a message instead of an open file")
        return descriptor

    def _receive(self) -> tuple[bytes, int | None]:
        receive = partial(self._end.recvmsg, _MESSAGE, socket.CMSG_SPACE(4))
        try:
            data, ancillary, _, _ = receive()
        except ConnectionResetError:
            # Raised once if the other end closed with unread messages. The messages that it sent can still be received.
            data, ancillary, _, _ = receive()
        if not data:
            raise EOFError("the other end is closed")
        descriptors = [array.array("i", sent[:4])[0] for _, kind, sent in ancillary if kind == socket.SCM_RIGHTS]
        return data, descriptors[0] if descriptors else None

    def speaks(self) -> bool:
        """Whether a message has arrived, or the other end is closed."""
        return self._has_event(select.POLLIN)

    def finish(self) -> None:
        """Send nothing more: after the messages already sent, the other end's `receive` raises EOFError."""
        with suppress(OSError):  # The other end, or this one, is closed.
            self._end.shutdown(socket.SHUT_WR)

    def stop_receiving(self) -> None:
        """Let a `receive` that waits in another thread raise EOFError."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RD)

    def is_closed_there(self) -> bool:
        """Whether no process has the other end open, or this end is closed."""
        return self._end.fileno() < 0 or self._has_event(0)

    def _has_event(self, kind: int) -> bool:
        waiting = select.poll()
        waiting.register(self._end.fileno(), kind)
        return bool(waiting.poll(0))

    def close(self) -> None:
        """Close this end; then `receive` of the other end raises EOFError."""
        self._end.close()
