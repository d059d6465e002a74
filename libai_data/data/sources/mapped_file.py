"""Files that are read through a memory map, opened when they are first read and again in every process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.atomic_files import PathLike
from libai_data.data.files.file_map import FileMap
from libai_data.data.files.identity import FileStatus, file_identity
from libai_data.data.sources.storage import LocalFile
from libai_data.errors import FormatError

_SECONDS_BETWEEN_CHECKS = 0.02


class MappedFile:
    """The bytes of a file that does not change while it is in use.

    Args:
        source: path or address; a file of a store is read from a copy, see `storage.LocalFile`.
        local: path that can be opened; by default that of a `LocalFile` of `source`.

    Attributes:
        source: path or address.
        identity: of the file when this object was made; see `libai_data.data.files.identity`.

    Raises:
        ConfigError: The file does not exist.
        OSError: The file may not be read.
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
        """Where it can be opened on this machine."""
        return self._local.path

    @property
    def is_copy(self) -> bool:
        """Whether it is the copy of a store's file."""
        return bool(self._local.identity)

    def current_identity(self) -> list[Any]:
        """The identity of the file that has the path now; a file of a store has the one that it was opened with."""
        return [self.source, self._local.identity] if self.is_copy else file_identity(self.path)

    def check_current(self) -> None:
        """Refuse what was opened by the path if another file has it now."""
        found = self.current_identity()
        if found != self.identity:
            raise FormatError(
                f"{self.source} has changed since it was opened: it was {self.identity}, and is {found}; open it again"
            )

    @property
    def size(self) -> int:
        """In bytes."""
        return self._status.size

    @property
    def bytes(self) -> Any:
        """What a slice is taken of: a map, or no bytes if the file is empty.

        A file that is replaced or removed while it is mapped stays readable as it was. One that is written to does not:
        this is noticed within 20 ms.

        Raises:
            FormatError: The file is another one than it was when this object was made.
        """
        return self._mapped().bytes

    @property
    def array(self) -> np.ndarray:
        """The same bytes, uint8 [size]."""
        mapped = self._mapped()
        if self._array is None:
            self._array = mapped.array
        return self._array

    def map(self) -> None:
        """Map the file now, so that it may be removed."""
        self._mapped()

    def release(self) -> None:
        """Take what was read out of this process's resident memory, since it is kept decoded."""
        if self._map is not None:
            self._map.release()

    def _mapped(self) -> FileMap:
        now = time.monotonic()
        if self._map is None:
            self._map, self._checked = FileMap(self.path, None if self.is_copy else self._status), now
        elif now - self._checked > _SECONDS_BETWEEN_CHECKS:
            self._map.check_not_written()
            self._checked = now
        return self._map

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None, "_array": None}
