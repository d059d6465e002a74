"""Parquet files of documents, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from libai_data.errors import ConfigError
from libai_data.data.text.files import Broken

_ROWS = 1024


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """The `pyarrow.parquet.ParquetFile` of a path.

    Raises:
        ConfigError: pyarrow is not installed.
        Broken: The file is no Parquet file, or a damaged one.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path} needs the package pyarrow: pip install 'libai_data[text]'") from error
    try:
        with ParquetFile(str(path)) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise Broken(f"{path} cannot be read as Parquet: {error}") from error


def read_rows(path: Path, start: int, stop: int, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of row groups `start` to `stop`, as dicts of those `columns` that the file has.

    Raises:
        Broken: The file is damaged.
    """
    with open_parquet(path) as file:
        known = [column for column in columns if column in file.schema_arrow.names]
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=list(range(start, stop)), columns=known):
            yield from batch.to_pylist()
