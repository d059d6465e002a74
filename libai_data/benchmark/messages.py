"""A line: JSON messages to and from another process of this machine."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from types import TracebackType
from typing import Any


class Line:
    """One end of a connection.

    Args:
        end: a connected socket.
        timeout: seconds to wait for a message; None waits for ever.
    """

    def __init__(self, end: socket.socket, timeout: float | None = None) -> None:
        end.settimeout(timeout)
        self._end = end
        self._file = end.makefile("rwb")

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: The other end is gone.
        """
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for a message.

        Raises:
            EOFError: The other end is closed.
            OSError: It is gone, or the time is up.
        """
        read = self._file.readline()
        if not read:
            raise EOFError("the other end is closed")
        message: dict[str, Any] = json.loads(read)
        return message

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):  # What could not be sent any more is nobody's concern.
            self._file.close()
        self._end.close()

    def __enter__(self) -> Line:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
