"""Indices of files of records that have none of their own: found once, and kept in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

import numpy as np

from libai_data.atomic_files import PathLike
from libai_data.data.files.identity import key_of
from libai_data.data.files.index_cache import cached_arrays
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.storage import CACHE_DIR, cache_home
from libai_data.errors.argument_rules import OUTPUT, check

FOLDER = ".libai_data_index"


def record_index(
    file: MappedFile, kind: str, build: Callable[[], Sequence[np.ndarray]], cache_dir: PathLike | None
) -> list[np.ndarray]:
    """The current index of a file: read from an index file, or built and written there.

    Args:
        file: of records.
        kind: what the index is of, with its version.
        build: makes the index, int64 [n] each.
        cache_dir: folder for index files; see `index_folder`. By default, the index of a local file is in
            `.libai_data_index` beside the file, and that of a store's file beside its copy.

    Returns:
        The arrays, read-only; see `cached_arrays`.

    Raises:
        ConfigError: The folder's path leads through a file.
        FormatError: The file changed meanwhile.
    """

    def build_of_this_file() -> Sequence[np.ndarray]:
        found = build()
        file.check_current()
        return found

    name = f"{file.path.name}-{key_of(kind, file.identity)}"
    if file.is_copy and cache_dir in (None, ""):
        # A part of the copy's entry in the cache, which goes with the copy.
        return cached_arrays(file.path.parent, name, build_of_this_file)
    return cached_arrays(index_folder(cache_dir, file.path.parent / FOLDER, name), name, build_of_this_file)


def index_folder(cache_dir: PathLike | None, beside: Path | None, name: str) -> Path:
    """The folder for an index.

    Args:
        cache_dir: what the user says; None or "" for the default.
        beside: the folder beside the data. By default it is chosen if the index is there already, or if it can be
            written to and LIBAI_DATA_CACHE_DIR is not set; otherwise `indices` in `cache_home()` is.
        name: of the index file, without its ending.

    Raises:
        ConfigError: `cache_dir` is no path on this machine.
    """
    if cache_dir not in (None, ""):
        check({"cache_dir": OUTPUT}, cache_dir=cache_dir)
        return Path(cache_dir)
    if beside is not None:
        writable = os.access(beside if beside.is_dir() else beside.parent, os.W_OK)
        if (beside / f"{name}.npy").exists() or (writable and not os.environ.get(CACHE_DIR)):
            return beside
    return cache_home() / "indices"
