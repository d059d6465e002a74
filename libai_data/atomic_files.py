"""Write files and folders completely or not at all, and append to files completely or not at all."""

from __future__ import annotations

import argparse
import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Union

from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import OUTPUT, OUTPUT_FILE, Rule

PathLike = Union[str, "os.PathLike[str]"]


@contextmanager
def written_whole(path: PathLike, unfinished: Path | None = None) -> Iterator[Path]:
    """Write a file that gets its name, and is on disk, when the block ends without an error.

    Args:
        path: final path of the file; an existing file is replaced.
        unfinished: temporary path on the same file system; by default a new hidden name in the same folder.

    Yields:
        The temporary path, to write to.

    Raises:
        ConfigError: The path has a device or a pipe, such as /dev/null, which the file would replace.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{path} is a device, a pipe or a socket, which a file would replace; give another path")
    unfinished = unfinished or path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        with named_if_full(path):
            yield unfinished
            with open(unfinished, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def written_together(folder: Path) -> Iterator[Path]:
    """Write a folder that gets its name when the block ends without an error.

    Args:
        folder: final path. If the folder exists, new files replace files of the same names in the folder.

    Yields:
        The temporary folder, to write to.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=str(folder.parent)))
    try:
        with named_if_full(folder):
            yield unfinished
        unfinished.chmod(0o755)
        try:
            os.rename(unfinished, folder)
        except OSError:  # the folder exists, perhaps because another process was faster
            for path in unfinished.iterdir():
                os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def named_if_full(path: PathLike) -> Iterator[None]:
    """If the disk or the file is full (`ulimit -f`), add the path to the error: `write` raises one without a path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and error.filename is None:
            error.filename = str(path)
        raise


class AppendFile:
    """A file to which each `append` writes all of its bytes or none. The first `append` opens the file.

    Args:
        path: path of the file; existing content stays.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor: int | None = None

    def append(self, data: bytes, header: bytes = b"") -> None:
        """Append bytes without buffering; if the file is empty, write `header` first.

        Raises:
            OSError: The file cannot be opened or written. A later call may succeed.
        """
        if self._descriptor is not None and not os.fstat(self._descriptor).st_nlink:
            self.close()  # Somebody has deleted the file, perhaps with its folder.
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o666)
        size = os.fstat(self._descriptor).st_size
        rest = memoryview(data if size else header + data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            # A part may have been written before the disk was full.
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


def output_path(text: str, rule: Rule = OUTPUT) -> Path:
    """The `type` of a command-line argument that names a folder, or a file or folder, to write."""
    if not rule.accepts(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be {rule.allowed}")
    return Path(text)


def output_file(text: str) -> Path:
    """The `type` of a command-line argument that names a file to write."""
    return output_path(text, OUTPUT_FILE)
