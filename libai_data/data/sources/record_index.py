"""Indices for record files whose format has no index: built once, and stored in an index file."""

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
STALE_INDEX = (
    "so the index is of another file that had this path, size and modification time: set "
    "LIBAI_DATA_FILE_IDENTITY=content"
)


def record_index(
    file: MappedFile, kind: str, build: Callable[[], Sequence[np.ndarray]], cache_dir: PathLike | None
) -> list[np.ndarray]:
    """The current index of a file: read-only arrays, read from its index file, or built and written to it; see
    `cached_arrays`. A FormatError if the file changed while the index was built.

    Args:
        kind: format of the indexed file, with a version.
        build: makes the arrays of the index, int64 [n] each.
        cache_dir: folder for index files; see `index_folder`. By default, the index of a local file is in
            `.libai_data_index` beside the file, and the index of a store's file is beside its copy.
    """

    def build_of_this_file() -> Sequence[np.ndarray]:
        found = build()
        file.check_current()
        return found

    name = f"{file.path.name}-{key_of(kind, file.identity)}"
    if file.is_copy and cache_dir in (None, ""):
        # The index is a part of the copy's entry in the cache, which removes both together.
        return cached_arrays(file.path.parent, name, build_of_this_file)
    return cached_arrays(index_folder(cache_dir, file.path.parent / FOLDER, name), name, build_of_this_file)


def index_folder(cache_dir: PathLike | None, beside: Path | None, name: str) -> Path:
    """The folder for an index with a name (without its ending).

    Args:
        cache_dir: the user's choice, a path on this machine or else a ConfigError; None or "" for the default.
        beside: a folder beside the data. The default is this folder if it already has the index, or if it is writable
            and LIBAI_DATA_CACHE_DIR is not set; otherwise `indices` in `cache_home()`.
    """
    if cache_dir not in (None, ""):
        check({"cache_dir": OUTPUT}, cache_dir=cache_dir)
        return Path(cache_dir)
    if beside is not None:
        writable = os.access(beside if beside.is_dir() else beside.parent, os.W_OK)
        if (beside / f"{name}.npy").exists() or (writable and not os.environ.get(CACHE_DIR)):
            return beside
    return cache_home() / "indices"
