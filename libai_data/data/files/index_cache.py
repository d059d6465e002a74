"""Indices that take long to build, cached in files: one process builds an index, and all processes map it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Callable

import numpy as np

from libai_data.atomic_files import written_whole
from libai_data.data.failure_notes import failures_noted, lock, note_failure, write_notes
from libai_data.data.files.file_map import FileMap, npy_array
from libai_data.data.random.global_generators import warn_once
from libai_data.errors import ConfigError, PeerError

logger = logging.getLogger(__name__)

_NUMBERS = np.dtype("<i8")


def cached_arrays(
    folder: Path,
    key: str,
    build: Callable[[], Sequence[np.ndarray]],
    is_current: Callable[[list[np.ndarray]], bool] = lambda _: True,
) -> list[np.ndarray]:
    """The arrays that `build` returns, read-only: loaded from a file if there is one, else built and written to it.

    If several processes ask at once, one process builds, and the others wait. This also works on nodes that share a
    file system with locks. If that process fails, the others fail too. If it dies, another one builds. The file appears
    complete or not at all. If no file can be written (a read-only folder, a full disk), each process builds the arrays
    in its own memory, without waiting.

    Args:
        folder: for the file; made if it does not exist.
        key: identifies all that the arrays depend on, such as a hash; part of the file's name.
        build: makes the arrays, int64 [n] each.
        is_current: returns whether the arrays of a file are still those that `build` would make; else they are rebuilt.

    Raises:
        ConfigError: `folder`, or a part of its path, is a file.
        PeerError: The process that was building the arrays has failed.
    """
    path = folder / f"{key}.npy"
    found = _load(path)
    if found is not None and is_current(found):
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"no index can be kept in {folder} ({error}); set cache_dir to another folder") from error
    except OSError as error:
        return _in_memory(build(), folder, error)
    try:
        try:
            noted = lock(descriptor, f"building the index {path}")
        except OSError as error:  # A file system without locks.
            return _in_memory(build(), folder, error)
        found = _load(path)
        if found is None or not is_current(found):
            if noted.times > 0:
                raise PeerError(f"the process that was building the index {path} has failed: {noted.reason}")
            try:
                if noted.times_not_kept > 0:
                    raise OSError(errno.ENOSPC, "another process could not")
                # So there is room for a note even if the disk is full later.
                write_notes(descriptor, failures_noted(descriptor))
            except OSError as error:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # So that the processes do not build one after the other.
                return _in_memory(build(), folder, error)
            found = _build(path, build, descriptor)
        return found
    finally:
        os.close(descriptor)  # This also releases the lock.


def _build(path: Path, build: Callable[[], Sequence[np.ndarray]], descriptor: int) -> list[np.ndarray]:
    try:
        arrays = build()
    except Exception as error:
        note_failure(descriptor, error)
        raise
    # All processes use one name: only the holder of the lock writes, and overwrites the file of a process that died.
    try:
        with written_whole(path, path.with_suffix(".unfinished")) as unfinished:
            _write(unfinished, arrays)
    except OSError as error:
        with suppress(OSError):
            noted = failures_noted(descriptor)
            write_notes(descriptor, noted._replace(times_not_kept=noted.times_not_kept + 1))
        return _in_memory(arrays, path.parent, error)
    found = _load(path)
    return _read_only(arrays) if found is None else found


def _in_memory(arrays: Sequence[np.ndarray], folder: Path, error: OSError) -> list[np.ndarray]:
    warn_once(
        "No index can be kept in %s (%s). Each process, in each run, builds its own in memory instead. To keep them, "
        "set cache_dir or LIBAI_DATA_CACHE_DIR to a folder that can be written to.",
        *(folder, error.strerror),
    )
    return _read_only(arrays)


def _read_only(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    found = [np.ascontiguousarray(array, _NUMBERS).view() for array in arrays]
    for array in found:
        array.flags.writeable = False
    return found


def _write(path: Path, arrays: Sequence[np.ndarray]) -> None:
    """Write one vector: the number of arrays, their lengths, and the arrays themselves."""
    lengths = [len(array) for array in arrays]
    head = np.array([len(arrays), *lengths], _NUMBERS)
    with path.open("wb") as file:
        shape = (len(head) + sum(lengths),)
        np.lib.format.write_array_header_1_0(file, {"descr": _NUMBERS.str, "fortran_order": False, "shape": shape})
        for array in (head, *arrays):
            file.write(np.ascontiguousarray(array, _NUMBERS).data)


def _load(path: Path) -> list[np.ndarray] | None:
    try:
        whole = npy_array(FileMap(path).array)
        count = int(whole[0])
        ends = 1 + count + np.cumsum(whole[1 : 1 + count])
        if whole.dtype != _NUMBERS or int(ends[-1]) != len(whole):
            raise ValueError("its lengths do not add up")
    except FileNotFoundError:
        return None
    except (ValueError, IndexError, EOFError, OSError) as broken:
        logger.warning("The index %s is broken (%s): it is built again.", path, broken)
        return None
    return np.split(whole[: ends[-1]], [1 + count, *ends[:-1]])[1:]
