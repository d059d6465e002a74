"""Files that are read from a memory map; each process opens the map at its first read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.atomic_files import PathLike
from libai_data.data.files.file_map import FileMap, check_not_written
from libai_data.data.files.identity import FileStatus, file_identity
from libai_data.data.sources.storage import LocalFile
from libai_data.errors import FormatError

_SECONDS_BETWEEN_CHECKS = 0.02


class MappedFile:
    """The bytes of a file that does not change while it is in use; a ConfigError if there is no such file.

    Args:
        source: path or address; a file of a store is read from a copy, see `storage.LocalFile`.
        local: the local file to open; by default `LocalFile(source)`.

    Attributes:
        source: path or address.
        identity: identity of the file when this object was made; see `libai_data.data.files.identity`.
    """

    def __init__(self, source: PathLike, local: LocalFile | None = None) -> None:
        self._local = LocalFile(source) if local is None else local
        self.source = self._local.source
        self.identity = self.current_identity()
        self._status = FileStatus.of(self.path)
        self._map: FileMap | None = None
        self._array: np.ndarray | None = None
        self._checked = 0.0

    @property
    def path(self) -> Path:
        """The path at which this machine can open the file."""
        return self._local.path

    @property
    def is_copy(self) -> bool:
        """Whether the file is the local copy of a store's file."""
        return bool(self._local.identity)

    def current_identity(self) -> list[Any]:
        """The identity of the file that is at the path now; for a store's file, the identity when it was opened."""
        return [self.source, self._local.identity] if self.is_copy else file_identity(self.path)

    def check_current(self) -> None:
        """Raise a FormatError if the path has another file now than when this object was made."""
        found = self.current_identity()
        if found != self.identity:
            raise FormatError(
                f"{self.source} has changed since it was opened: it was {self.identity}, and is {found}; open it again"
            )

    @property
    def size(self) -> int:
        """Size of the file, in bytes."""
        return self._status.size

    @property
    def bytes(self) -> Any:
        """The content, to be sliced: a memory map, or empty bytes if the file is empty.

        If the file is replaced or removed while it is mapped, the old content stays readable. If it is written to, the
        first read later than 20 ms after the last check raises a FormatError.
        """
        return self._mapped().bytes

    @property
    def array(self) -> np.ndarray:
        """The content, uint8 [size]."""
        mapped = self._mapped()
        if self._array is None:
            self._array = mapped.array
        return self._array

    def map(self) -> None:
        """Map the file now, so that it may be removed."""
        self._mapped()

    def check_not_written(self) -> None:
        """Raise a FormatError if the file was written to since it was opened; checked at most every 20 ms.

        This also holds if something else reads or maps the file, such as an array in another process.
        """
        is_due = time.monotonic() - self._checked > _SECONDS_BETWEEN_CHECKS
        if is_due and (self._map is not None or not self.is_copy):
            check_not_written(self.path, self._status if self._map is None else self._map.status)
            # Only now: after an error, the next read must not use the map, which may be longer than the file.
            self._checked = time.monotonic()

    def release(self) -> None:
        """Remove the pages that were read from this process's resident memory, if their content is cached elsewhere."""
        if self._map is not None:
            self._map.release()

    def _mapped(self) -> FileMap:
        if self._map is None:
            self._map = FileMap(self.path, None if self.is_copy else self._status)
            self._checked = time.monotonic()
        else:
            self.check_not_written()
        return self._map

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None, "_array": None}
