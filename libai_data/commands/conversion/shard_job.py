"""Writing one shard of a conversion, and reading it again."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.atomic_files import written_whole
from libai_data.commands.conversion.shard_writers import FORMATS
from libai_data.data.sources.opening import open_source
from libai_data.errors import FormatError, SchemaError

_AT_ONCE = 256


@dataclass(frozen=True)
class ShardJob:
    """A shard to write.

    Args:
        path: of its file.
        first: index of the first record.
        stop: behind the last.
        input: identity of these records, and of what all shards have in common.
    """

    path: str
    first: int
    stop: int
    input: str = ""


@dataclass(frozen=True)
class ShardReport:
    """What was written.

    Args:
        records: how many.
        size: bytes of the file.
        digest: of the records, as a source gives them.
        input: the job's; a shard whose input has another identity now is written again.
    """

    records: int
    size: int
    digest: str
    input: str = ""


class WriteShard:
    """Writes shards, of a source that is opened once in each process.

    Args:
        paths: of the source.
        format: of the source.
        to: of the shards.
        schema: what `schema_of` has found.
        folder: for unfinished files.
    """

    def __init__(self, paths: Any, format: str, to: str, schema: Any, folder: str) -> None:
        self._paths, self._format, self._to, self._schema, self._folder = paths, format, to, schema, folder
        self._source: Any | None = None

    def __call__(self, job: ShardJob) -> ShardReport:
        """Write a shard under its name, after it was read again as it was written.

        Raises:
            SchemaError: The format cannot hold a record; its index is named.
            FormatError: A record cannot be read, or the shard holds other records than were written.
        """
        if self._source is None:
            self._source = open_source(self._paths, self._format)
        path = Path(job.path)
        with written_whole(path, Path(self._folder) / f"{path.name}.{os.getpid()}.unfinished") as unfinished:
            written = self._write(unfinished, job)
            read = self._digest_of_file(unfinished)
            if read != written:
                raise FormatError(
                    f"{path}: the shard of records {job.first} to {job.stop} does not read back as it was written; is "
                    "the disk, or the memory, in order?"
                )
        return ShardReport(job.stop - job.first, path.stat().st_size, written, job.input)

    def _write(self, path: Path, job: ShardJob) -> str:
        digest = _Digest()
        writer = FORMATS[self._to].writer(path, self._schema)
        try:
            for first in range(job.first, job.stop, _AT_ONCE):
                stop = min(first + _AT_ONCE, job.stop)
                try:
                    expected = writer.write(self._source.read_many(range(first, stop)), first)  # type: ignore[union-attr]
                except SchemaError as error:
                    raise SchemaError(f"records {first} to {stop - 1}: {error}") from error
                digest.add(expected)
        finally:
            writer.close()
        return digest.value()

    def _digest_of_file(self, path: Path) -> str:
        digest = _Digest()
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            # A shard under a name of its own for a while needs no index that stays.
            options = {"cache_dir": folder} if self._to == "webdataset" else {}
            digest.add(FORMATS[self._to].source([path], **options))
        return digest.value()


class _Digest:
    """BLAKE2b of records, whatever they are made of."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, records: Iterable[Any]) -> None:
        """Take in records, in their order."""
        for record in records:
            self._value(record)

    def value(self) -> str:
        """Of all records so far."""
        return self._hash.hexdigest()

    def _value(self, value: Any) -> None:
        if isinstance(value, dict):
            self._piece("dict", str(len(value)).encode())
            for name in sorted(value):
                self._piece("name", name.encode())
                self._value(value[name])
        elif isinstance(value, (list, tuple)):
            self._piece("list", str(len(value)).encode())
            for each in value:
                self._value(each)
        elif isinstance(value, np.ndarray):
            self._piece(f"{value.dtype}{value.shape}", value.tobytes())
        else:
            self._piece(type(value).__name__, value if isinstance(value, bytes) else repr(value).encode())

    def _piece(self, kind: str, content: bytes) -> None:
        self._hash.update(f"{kind} {len(content)}\n".encode())
        self._hash.update(content)
