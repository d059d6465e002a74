"""Indices of files of records that have none of their own: found once, and kept in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

import numpy as np

from libai_data.identity import key_of
from libai_data.index_cache import cached_arrays
from libai_data.sources.mapped_file import MappedFile
from libai_data.sources.storage import CACHE_DIR, PathLike, cache_home

FOLDER = ".libai_data_index"


def record_index(
    file: MappedFile, kind: str, build: Callable[[], Sequence[np.ndarray]], cache_dir: PathLike | None
) -> list[np.ndarray]:
    """The index of a file, as it is now: from an index file, else built and kept there.

    Args:
        file: of records.
        kind: what the index is of, with its version.
        build: makes the index, int64 [n] each.
        cache_dir: folder for index files. By default `indices` in the folder that LIBAI_DATA_CACHE_DIR names. Where it
            is not set, `.libai_data_index` beside the file, or `indices` in `cache_home()` if nothing can be written
            beside the file.

    Returns:
        The arrays, read-only views of the index file's memory map.

    Raises:
        ConfigError: The folder cannot be written to.
        FormatError: The file changed meanwhile.
    """

    def build_of_this_file() -> Sequence[np.ndarray]:
        found = build()
        file.check_current()
        return found

    name = f"{file.path.name}-{key_of(kind, file.identity)}"
    return cached_arrays(_folder(file, cache_dir), name, build_of_this_file)


def _folder(file: MappedFile, cache_dir: PathLike | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    beside = file.path.parent / FOLDER
    writable = os.access(beside if beside.is_dir() else file.path.parent, os.W_OK)
    if file.is_copy or os.environ.get(CACHE_DIR) or not writable:
        return cache_home() / "indices"
    return beside
