"""Files that are published with a check sum, fetched when somebody asks for it."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Sequence

from libai_data.errors import DataPipelineError, StorageError
from libai_data.sources.storage import LocalFile

logger = logging.getLogger(__name__)


@contextmanager
def downloaded(urls: Sequence[str], md5: str) -> Iterator[Path]:
    """A copy of a published file in the cache of this node, checked; one process fetches it, others wait.

    Args:
        urls: where it is published; the second is asked when the first does not answer, and so on.
        md5: of the file, in hexadecimal.

    Yields:
        The copy, in use until the block ends.

    Raises:
        StorageError: No address gives a file with this sum; each is named with what it gave.
    """
    told = []
    for url in urls:
        logger.info("Downloading %s.", url)
        try:
            file = LocalFile(url)
        except DataPipelineError as error:
            told.append(str(error))
            continue
        with file:
            found = _md5_of(file.path)
            if found == md5:
                yield file.path
                return
        told.append(f"{url} has the md5 sum {found}, and not {md5}")
    raise StorageError(f"the file cannot be downloaded: {'; '.join(told)}")


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


def _md5_of(path: Path) -> str:
    digest = hashlib.md5()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
