"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_together(folder: Path) -> Iterator[Path]:
    """A folder that appears whole when the block ends, or not at all.

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
