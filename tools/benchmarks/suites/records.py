"""Records: 100 to 300 bytes each, in shuffled order and batches, beside the readers that come with the formats."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable

import numpy as np

from libai_data.data.sources import ArrayRecordSource, ParquetSource, WebDatasetSource
from libai_data.errors import ConfigError
from tools.benchmarks.rows import AtLeast, Contender, Measure, Row, Scale, Unavailable
from tools.benchmarks.timing import seconds_a_batch

BATCH = 256
_FACTOR = 2.0
_LEAST_BATCHES = 4
_ROW_GROUP = 10_000

ReadMany = Callable[[list[int]], Any]


def rows(scale: Scale) -> list[Row]:
    """The rows of the suite; the files are made here, in `scale.folder`."""
    count = 2000 if scale.quick else 10**6
    work = f"{count:,} records of 100 to 300 bytes, batches of {BATCH} in shuffled order"
    made = _Files(scale.folder, count)

    def row(name: str, ours: Callable[[Path], ReadMany], *peers: Contender, than: str) -> Row:
        contenders = (_contender("libai_data", made, name, ours, scale.seconds), *peers)
        return Row(name, f"{name}: {work}", "0", contenders, (AtLeast("libai_data", than, _FACTOR),))

    def peer(name: str, kind: str, opened: Callable[[Path], ReadMany]) -> Contender:
        return _contender(name, made, kind, opened, scale.seconds)

    return [
        row(
            "array_record",
            lambda path: ArrayRecordSource(path).read_many,
            peer("reader.read", "array_record", _array_record_reader),
            than="reader.read",
        ),
        row(
            "tar",
            lambda path: WebDatasetSource(path).read_many,
            peer("tarfile", "tar", _tarfile),
            than="tarfile",
        ),
        row(
            "parquet",
            lambda path: ParquetSource(path).read_many,
            peer("row groups", "parquet", _parquet_row_groups),
            than="row groups",
        ),
    ]


class _Files:
    """Files of the same records, written by the formats' own packages when they are first needed."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self.count = folder, count

    def path(self, kind: str) -> Path:
        """The file of a format.

        Raises:
            Unavailable: What writes it is not installed.
        """
        path = self._folder / f"records.{kind}"
        if not path.exists():
            try:
                {"array_record": _write_array_record, "tar": _write_tar, "parquet": _write_parquet}[kind](
                    path, self._records()
                )
            except ModuleNotFoundError as error:
                raise Unavailable(f"{error.name} is not installed") from None
        return path

    def _records(self) -> Iterator[bytes]:
        random = np.random.default_rng(0)
        for _ in range(0, self.count, 1000):
            for size in random.integers(100, 301, 1000).tolist():
                yield random.bytes(size)


def _write_array_record(path: Path, records: Iterator[bytes]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def _write_tar(path: Path, records: Iterator[bytes]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as file:
        for number, record in enumerate(records):
            info = tarfile.TarInfo(f"{number:08d}.bin")
            info.size = len(record)
            file.addfile(info, io.BytesIO(record))


def _write_parquet(path: Path, records: Iterator[bytes]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"record": list(records)}), str(path), row_group_size=_ROW_GROUP)


def _array_record_reader(path: Path) -> ReadMany:
    """The package's reader, with what its data source asks it for."""
    from array_record.python.array_record_module import ArrayRecordReader

    options = "readahead_buffer_size:0"
    read: ReadMany = ArrayRecordReader(str(path), options=options, file_reader_buffer_size=32768).read
    return read


def _tarfile(path: Path) -> ReadMany:
    """Python's tarfile, which has listed all members before the time is taken."""
    file = tarfile.open(path)  # noqa: SIM115
    members = file.getmembers()
    return lambda indices: [file.extractfile(members[index]).read() for index in indices]  # type: ignore[union-attr]


def _parquet_row_groups(path: Path) -> ReadMany:
    """What does not hold the whole file: the row groups of a batch, and the rows of each."""
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(str(path))

    def read(indices: list[int]) -> Any:
        groups = np.array(indices) // _ROW_GROUP
        found: list[Any] = []
        for group in np.unique(groups).tolist():
            own = np.array(indices)[groups == group] - group * _ROW_GROUP
            found += file.read_row_group(group).take(own).to_pylist()
        return found

    return read


def _contender(name: str, files: _Files, kind: str, opened: Callable[[Path], ReadMany], seconds: float) -> Contender:
    @contextmanager
    def prepared() -> Iterator[Measure]:
        path = files.path(kind)
        try:
            read_many = opened(path)
        except (ModuleNotFoundError, ConfigError) as error:
            raise Unavailable(str(error)) from error
        order = np.random.default_rng(1).permutation(files.count)
        batches = _batches(order)
        yield lambda: seconds_a_batch(lambda: read_many(next(batches)), seconds, 1, _LEAST_BATCHES) / BATCH

    return Contender(name, prepared)


def _batches(order: np.ndarray) -> Iterator[list[int]]:
    while True:
        for first in range(0, len(order) - BATCH + 1, BATCH):
            yield order[first : first + BATCH].tolist()
