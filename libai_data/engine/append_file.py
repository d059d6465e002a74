"""Files that grow while a training runs, on a disk that may be full."""

from __future__ import annotations

import os
from contextlib import suppress


class AppendFile:
    """A file to which each call appends all of its bytes, or none. Opened by the first call.

    Args:
        path: the file; what it has already stays.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor: int | None = None

    def append(self, data: bytes, header: bytes = b"") -> None:
        """Append bytes, after `header` if the file is empty; nothing is buffered.

        Raises:
            OSError: The file cannot be opened or written. A later call may succeed.
        """
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o666)
        size = os.fstat(self._descriptor).st_size
        rest = memoryview(data if size else header + data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            # A full disk may have taken a part.
            with suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise

    def close(self) -> None:
        """Flush the file to disk and close it."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
