"""Indices of files of records that have none of their own: found once, and kept in a file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

import numpy as np

from libai_data.index_cache import cached_arrays
from libai_data.sources.mapped_file import MappedFile
from libai_data.sources.storage import PathLike

FOLDER = ".libai_data_index"


def record_index(
    file: MappedFile, kind: str, build: Callable[[], Sequence[np.ndarray]], cache_dir: PathLike | None
) -> list[np.ndarray]:
    """The index of a file, as it is now: from an index file, else built and kept there.

    Args:
        file: of records.
        kind: what the index is of, with its version.
        build: makes the index, int64 [n] each.
        cache_dir: folder for index files. By default `.libai_data_index` beside the file, or `libai_data/index` in the
            user's cache where nothing can be written there, and for files of stores.

    Returns:
        The arrays, read-only views of the index file's memory map.

    Raises:
        ConfigError: The folder cannot be written to.
    """
    digest = hashlib.blake2b(f"{kind} {file.identity}".encode(), digest_size=12).hexdigest()
    return cached_arrays(_folder(file, cache_dir), f"{file.path.name}-{digest}", build)


def _folder(file: MappedFile, cache_dir: PathLike | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    beside = file.path.parent / FOLDER
    if not file.is_copy and os.access(beside if beside.is_dir() else file.path.parent, os.W_OK):
        return beside
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "libai_data" / "index"
