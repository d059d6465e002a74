"""Files that are published with a check sum, fetched when somebody asks for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from libai_data.errors import DataPipelineError, StorageError
from libai_data.data.sources.remote import md5_of
from libai_data.data.sources.storage import LocalFile

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
            found = md5_of(file.path)
            if found == md5:
                yield file.path
                return
        told.append(f"{url} has the md5 sum {found}, and not {md5}")
    raise StorageError(f"the file cannot be downloaded: {'; '.join(told)}")
