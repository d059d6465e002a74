"""Files and folders that appear under their names whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Union

PathLike = Union[str, "os.PathLike[str]"]


@contextmanager
def written_whole(path: PathLike, unfinished: Path | None = None) -> Iterator[Path]:
    """A file that is on disk, under its name, when the block ends without an error.

    Args:
        path: of the file; what is there now is replaced.
        unfinished: where it is written, on the same file system; by default a hidden name of its own beside it.

    Yields:
        Where to write.
    """
    path = Path(path)
    unfinished = unfinished or path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        yield unfinished
        with open(unfinished, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def written_together(folder: Path) -> Iterator[Path]:
    """A folder that appears when the block ends without an error.

    Args:
        folder: to appear; if it is there already, the files that were written replace those of their names.

    Yields:
        Where to write.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=str(folder.parent)))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        try:
            os.rename(unfinished, folder)
        except OSError:  # it is there, perhaps because another process was faster
            for path in unfinished.iterdir():
                os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
