"""The suite of records measures what it says, on few records, and all readers give the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from libai_data.benchmark.rounds import Scale, measure
from libai_data.benchmark.suites import records


@pytest.mark.slow
def test_each_row_is_measured(tmp_path: Path) -> None:
    for package in ("array_record", "pyarrow"):
        pytest.importorskip(package)
    rows = records.rows(Scale(quick=True, seconds=0.0, folder=tmp_path))
    assert [row.name for row in rows] == ["array_record", "tar", "parquet"]
    for row in rows:
        measured = measure(row, 1, lambda _: None, settle=0)
        assert not measured.missing
        assert all(values[0] > 0 for values in measured.values.values())
        assert all(claim.judge(measured.values, measured.missing).value is not None for claim in row.claims)


def test_the_peers_read_the_records_that_we_read(tmp_path: Path) -> None:
    for package in ("array_record", "pyarrow"):
        pytest.importorskip(package)
    files, indices = records._Files(tmp_path, 2000), [5, 1999, 0]
    array_record, tar, parquet = (files.path(kind) for kind in ("array_record", "tar", "parquet"))
    expected = records.ArrayRecordSource(array_record).read_many(indices)
    assert list(records._array_record_reader(array_record)(indices)) == expected
    assert list(records._array_record_data_source(array_record)(indices)) == expected
    assert records._tarfile(tar)(indices) == expected
    assert [sample["bin"] for sample in records.WebDatasetSource(tar).read_many(indices)] == expected
    by_table = records._parquet_table(parquet)(indices)
    assert by_table == records.ParquetSource(parquet).read_many(indices) == [{"record": each} for each in expected]
    assert sorted(row["record"] for row in records._parquet_row_groups(parquet)(indices)) == sorted(expected)
