"""Directories that are written completely or not at all, and in which later damage is detected.

A directory is written as ``<name>.partial``. After every file and then the directory itself were flushed to disk, the
directory gets its final name. Its manifest has each file's size and CRC-32.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from libai_data.atomic_files import written_whole
from libai_data.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_KIND = "libai_data checkpoint "
FORMAT = f"{_KIND}1"
_PARTIAL = ".partial"
_REPLACED = ".replaced"
OWN_ENDINGS = (_PARTIAL, _REPLACED)
"""Endings of the names of unfinished and replaced directories and files."""
_SUFFIXES = (".safetensors", ".json")
LAST = "last_checkpoint"
_CHUNK = 1 << 22


class OtherVersionError(CheckpointError):
    """A checkpoint is that of another version of this package, so it may be intact."""


class CheckedFile:
    """An open binary file, with the size and checksum of what was written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = self.crc = 0

    def write(self, data: Any) -> None:
        """Append bytes, or anything with a buffer of bytes."""
        self._file.write(data)
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)


class PendingDirectory:
    """A directory that is being written; `commit` replaces what is at its path `target`.

    As a context manager, it removes what was written if `commit` was not called.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self._partial = target.with_name(target.name + _PARTIAL)
        self._files: dict[str, dict[str, int]] = {}
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)

    @contextmanager
    def open(self, name: str) -> Iterator[CheckedFile]:
        """A file to write. At the end of the block, it is flushed to disk, and the manifest has it."""
        with open(self._partial / name, "wb") as file:
            checked = CheckedFile(file)
            yield checked
            file.flush()
            os.fsync(file.fileno())
        self._files[name] = {"bytes": checked.size, "crc32": checked.crc}

    def add_json(self, name: str, content: Any) -> None:
        """Write a JSON file and add it to the manifest."""
        with self.open(name) as file:
            file.write(json.dumps(content, indent=1).encode())

    def add_same(self, name: str, directory: Path) -> None:
        """Add an unchanged file of another such directory: a hard link if the file system has these, else a copy."""
        try:
            os.link(directory / name, self._partial / name)
        except OSError:
            shutil.copy2(directory / name, self._partial / name)
        self._files[name] = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"][name]

    def commit(self) -> None:
        """Write the manifest, flush everything, and give the directory its name."""
        self.add_json(MANIFEST, {"format": FORMAT, "files": self._files})
        sync_directory(self._partial)
        replaced = self.target.with_name(self.target.name + _REPLACED)
        if self.target.exists():
            # A rename cannot replace a directory that has files, so the old directory is renamed first. If the machine
            # fails between the two renames, `recover` restores the old directory.
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(self.target, replaced)
        os.rename(self._partial, self.target)
        sync_directory(self.target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def __enter__(self) -> PendingDirectory:
        return self

    def __exit__(self, *raised: Any) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_small_file(path: Path, text: str) -> None:
    """Replace a small file: the old or the new text is always there. Raises OSError if the new one is not written."""
    with written_whole(path, path.with_name(path.name + _PARTIAL)) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    sync_directory(path.parent)


def recover(folder: Path) -> None:
    """Clean up after a killed writer: remove unfinished directories, and restore one whose replacement is missing.

    No other process may write in the folder.
    """
    if not folder.is_dir():
        return
    for path in filter(is_remainder, folder.iterdir()):
        if path.name.endswith(_REPLACED):
            target = path.with_name(path.name[: -len(_REPLACED)])
            if target.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                logger.warning("%s was being replaced when the run died; the old one is put back.", target)
                os.rename(path, target)
        elif path.name.endswith(_PARTIAL):
            logger.warning("%s was never finished; it is removed.", path)
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def is_remainder(path: Path) -> bool:
    """Whether a killed writer of this package left a file or directory, and no other program: by names and contents."""
    if not path.name.endswith(OWN_ENDINGS):
        return False
    if path.is_dir():
        return all(entry.suffix in _SUFFIXES for entry in path.iterdir())
    return path.name == LAST + _PARTIAL


def verify(directory: Path) -> None:
    """Compare all files of a directory with its manifest. Raises CheckpointError if it is missing, damaged, or
    of another format, and OtherVersionError if another version of this package wrote it.
    """
    manifest_path = directory / MANIFEST
    if not os.path.isdir(directory):  # Unlike `Path.is_dir`, it does not raise if a name is too long.
        is_file = os.path.isfile(directory)
        raise CheckpointError(f"there is no checkpoint {directory}" + " (it is a file, not a directory)" * is_file)
    if not manifest_path.is_file():
        of_run = "; it is the folder of a run, so give one of its checkpoints" if (directory / LAST).is_file() else ""
        raise CheckpointError(f"{directory} is not a checkpoint of libai_data: it has no {MANIFEST}{of_run}")
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        files = {name: (int(file["bytes"]), int(file["crc32"])) for name, file in manifest["files"].items()}
        form = manifest["format"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {directory} is damaged: {manifest_path} cannot be read ({error})") from error
    if form != FORMAT and str(form).startswith(_KIND):
        raise OtherVersionError(
            f"checkpoint {directory} has format {form!r}, that of another version of libai_data; this version reads "
            f"{FORMAT!r}. Use the other version, or move the checkpoint away to continue with an earlier one"
        )
    if form != FORMAT:
        raise CheckpointError(f"checkpoint {directory} has format {form!r}; this version reads {FORMAT!r}")
    for name, (written, crc) in files.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {directory} is incomplete: {name} is missing")
        size = path.stat().st_size
        if size != written:
            raise CheckpointError(
                f"checkpoint {directory} is damaged: {name} has {size} bytes, but {written} were written"
            )
        if _crc_of(path) != crc:
            raise CheckpointError(f"checkpoint {directory} is damaged: the contents of {name} have changed (CRC-32)")


def _crc_of(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
