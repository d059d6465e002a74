"""Files that are read through a memory map, opened when they are first read and again in every process."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.errors import FormatError
from libai_data.sources.storage import LocalFile, PathLike


class MappedFile:
    """The bytes of a file that does not change while it is in use.

    Args:
        source: path or address; a file of a store is read from a copy, see `storage.LocalFile`.

    Raises:
        ConfigError: It is not there.
        OSError: It may not be read.
    """

    def __init__(self, source: PathLike) -> None:
        self._local = LocalFile(source)
        self.source = self._local.source
        """Path or address."""
        status = os.stat(self.path)
        self._status = (status.st_size, status.st_mtime_ns)
        self._bytes: Any | None = None
        self._array: np.ndarray | None = None

    @property
    def path(self) -> Path:
        """Where it can be opened on this machine."""
        return self._local.path

    @property
    def is_copy(self) -> bool:
        """Whether it is the copy of a store's file."""
        return bool(self._local.identity)

    @property
    def identity(self) -> str:
        """Tells it from other files, and from itself after a change."""
        where = self.source if self.is_copy else os.path.abspath(self.path)
        return f"{where} {self._local.identity or self._status}"

    @property
    def size(self) -> int:
        """In bytes."""
        return self._status[0]

    @property
    def bytes(self) -> Any:
        """What a slice is taken of: a map, or no bytes if the file is empty.

        Raises:
            FormatError: The file is another one than it was when this object was made.
        """
        if self._bytes is None:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_size, status.st_mtime_ns) != self._status and not self.is_copy:
                    raise FormatError(
                        f"{self.source} has changed since it was opened: from {self._status[0]} bytes to "
                        f"{status.st_size}, or at another time; make the source anew"
                    )
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
        return self._bytes

    @property
    def array(self) -> np.ndarray:
        """The same bytes, uint8 [size]."""
        if self._array is None:
            self._array = np.frombuffer(self.bytes, np.uint8)
        return self._array

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bytes": None, "_array": None}
