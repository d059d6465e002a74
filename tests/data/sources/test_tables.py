"""Columns of Parquet, Arrow and other files: which are read, and what an error says about those that cannot be read."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, time, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from libai_data.data.sources import ParquetSource, open_source
from libai_data.errors import ConfigError, FormatError, SchemaError
from tests.data.sources.record_files import ENDINGS, SOURCES, texts, write

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def _write(path: Path, columns: Mapping[str, Any], rows_together: int = 4000) -> None:
    table = pyarrow.table(dict(columns))
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=rows_together)
        return
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema, options=options) as writer:
        writer.write_table(table, rows_together)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "mds", "litdata"])
def test_columns_are_chosen_and_misspelt_ones_answered(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "shards").mkdir()
    write(kind, tmp_path / "shards" / f"a.{ENDINGS[kind]}", texts(9))
    for paths, streaming in ((tmp_path / "shards", False), (f"file://{tmp_path}/shards", True)):
        source = open_source(paths, streaming=streaming, columns=["text"])
        assert list(pickle.loads(pickle.dumps(source))[8]) == ["text"]
        assert source.identity != open_source(paths, streaming=streaming).identity
        with pytest.raises(ConfigError, match=r"no column 'txt'.*Did you mean 'text'"):
            open_source(paths, streaming=streaming, columns=["txt"])[0]
        with pytest.raises(ConfigError, match="columns is 'text'; it must be a list, each a text"):
            open_source(paths, streaming=streaming, columns="text")[0]


def test_columns_are_refused_for_formats_that_have_none(tmp_path: Path) -> None:
    write("jsonl", tmp_path / "a.jsonl", texts(9))
    with pytest.raises(ConfigError, match=r"the format 'jsonl' has no columns to choose; leave out `columns`, or use"):
        open_source(tmp_path / "a.jsonl", columns=["text"])


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": [1]}, r"b\.\w+ has the columns {'b': 'None'}, .*a\.\w+ {'b': 'string'}"),
        ({"a": [1], "b": ["x"], "c": [2]}, r"b\.\w+ has the columns {'c': 'int64'}, .*a\.\w+ {'c': 'None'}"),
        ({"a": [1.5], "b": ["x"]}, r"{'a': 'double'}, .*{'a': 'int64'}"),
        ({"a": [1], "b": [["x"]]}, r"{'b': 'list<\w+: string>'}, .*{'b': 'string'}"),
        ({"a": [1], "b": [b"x"]}, r"{'b': 'binary'}, .*{'b': 'string'}"),
    ],
)
def test_files_whose_columns_differ_are_refused_when_they_are_opened_or_streamed(
    tmp_path: Path, kind: str, other: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / f"a.{kind}", {"a": [1], "b": ["x"]})
    _write(tmp_path / f"b.{kind}", other)
    with pytest.raises(SchemaError, match=message):
        SOURCES[kind](tmp_path)
    alike = [name for name in ("a", "b") if name in other and f"'{name}'" not in message]
    assert len(SOURCES[kind](tmp_path, columns=alike)) == 2
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(SchemaError, match=message):
        list(open_source(f"file://{tmp_path}/*.{kind}", streaming=True))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, Decimal("1")),
        (datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=timezone.utc)),
        ([1], [1.0]),
        ([[True]], [[1]]),
        ({"x": {"y": "text"}}, {"x": {"y": b"bytes"}, "z": 1}),
    ],
)
def test_columns_whose_values_differ_in_kind_below_their_surface_are_refused(
    tmp_path: Path, one: Any, other: Any
) -> None:
    for name, value in (("a", one), ("b", other)):
        _write(tmp_path / f"{name}.arrow", {"column": [value]})
    with pytest.raises(SchemaError, match=r"the files differ: .*/b\.arrow has the columns {'column'"):
        SOURCES["arrow"](tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns_of_one_kind_of_values_may_have_several_types(tmp_path: Path, kind: str) -> None:
    text = pyarrow.array(["x", "x"])
    _write(tmp_path / f"a.{kind}", {"a": pyarrow.array([1, 2], "int32"), "b": text, "c": [[None], []]})
    _write(tmp_path / f"b.{kind}", {"b": text.dictionary_encode(), "a": [3, 4], "c": [[1], [2]]})
    _write(tmp_path / f"c.{kind}", {"a": [None, None], "b": text.cast("large_string"), "c": [[3], None]})
    # As pandas writes no rows.
    _write(tmp_path / f"_.{kind}", {"a": pyarrow.array([], "double")})
    assert list(SOURCES[kind](tmp_path))[1::2] == [
        {"a": 2, "b": "x", "c": []},
        {"a": 4, "b": "x", "c": [2]},
        {"a": None, "b": "x", "c": None},
    ]
    _write(tmp_path / f"d.{kind}", {"a": [5], "b": pyarrow.array(["x"], "string_view"), "c": [[]]})
    assert SOURCES[kind](tmp_path)[6] == {"a": 5, "b": "x", "c": []}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_workers_get_the_names_of_columns_once_for_all_files(tmp_path: Path, kind: str) -> None:
    columns = {f"column {number}": [1] for number in range(300)}
    sizes = []
    for number in range(2):
        _write(tmp_path / f"{number}.{kind}", columns)
        sizes.append(len(pickle.dumps(SOURCES[kind](tmp_path))))
    assert sizes[1] < 1.5 * sizes[0]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_name_of_a_column_that_is_not_utf_8_is_damage(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    _write(path, {"name": [1]})
    path.write_bytes(path.read_bytes().replace(b"name", b"n\xffme"))
    with pytest.raises(FormatError, match=rf"a\.{kind}"):
        SOURCES[kind](path)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("values", "type"), [([0, 10**3, 10**12], pyarrow.timestamp("s")), ([0, 10**3, 1], pyarrow.time64("ns"))]
)
def test_a_record_with_a_date_or_time_that_python_does_not_have_is_named(
    tmp_path: Path, kind: str, values: list[int], type: Any
) -> None:
    _write(tmp_path / f"a.{kind}", {"a": pyarrow.array(values, type), "b": [1, 2, 3]})
    assert len(SOURCES[kind](tmp_path).read_many([0, 1])) == 2
    with pytest.raises(FormatError, match=rf"a\.{kind}, record 2: Python has no value .* \(columns="):
        SOURCES[kind](tmp_path).read_many([1, 2])
    assert SOURCES[kind](tmp_path, columns=["b"])[2] == {"b": 3}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_times_with_nanoseconds_are_refused_in_nested_values_too(tmp_path: Path, kind: str) -> None:
    times = pyarrow.array([2000, None, 1], pyarrow.time64("ns"))
    ends, exact = [0, 1, 2, 3], time(microsecond=2)
    columns = {
        "list": (pyarrow.ListArray.from_arrays(ends, times), [exact], [None]),
        "large": (pyarrow.LargeListArray.from_arrays(ends, times), [exact], [None]),
        "fixed": (pyarrow.FixedSizeListArray.from_arrays(times, 1), [exact], [None]),
        "struct": (
            pyarrow.StructArray.from_arrays([times, times], ["x", "y"]),
            {"x": exact, "y": exact},
            {"x": None, "y": None},
        ),
        "map": (pyarrow.MapArray.from_arrays(ends, ["a", "b", "c"], times), [("a", exact)], [("b", None)]),
        "dictionary": (pyarrow.DictionaryArray.from_arrays([0, 1, 2], times), exact, None),
    }
    if kind == "parquet":  # It has no dictionaries of times.
        del columns["dictionary"]
    _write(tmp_path / f"a.{kind}", {name: column for name, (column, *_) in columns.items()})
    for name, (_, *expected) in columns.items():
        source = SOURCES[kind](tmp_path, columns=[name])
        assert [record[name] for record in source.read_many([0, 1])] == expected
        with pytest.raises(FormatError, match=rf"a\.{kind}, record 2: Python has no value .* would lose data: 1; "):
            source[2]


def test_times_with_nanoseconds_are_refused_where_arrow_cannot_cast_them(tmp_path: Path) -> None:
    times, kinds = pyarrow.array([2000, 1], pyarrow.time64("ns")), pyarrow.array([0, 0], pyarrow.int8())
    union = pyarrow.UnionArray.from_sparse(kinds, [times, pyarrow.array([1, 2])])
    columns = {
        "run_end_encoded": pyarrow.RunEndEncodedArray.from_arrays([1, 2], times),
        "list_view": pyarrow.ListViewArray.from_arrays([0, 1], [1, 1], times),
        "sparse_union": union,
        "list<item: sparse_union": pyarrow.ListArray.from_arrays([0, 1, 2], union),
    }
    _write(tmp_path / "a.arrow", {**columns, "b": [1, 2]})
    for name in columns:
        with pytest.raises(FormatError, match=rf"a\.arrow, record 1: .* the nanoseconds within {name}.* \(columns="):
            SOURCES["arrow"](tmp_path, columns=[name])[1]
    assert SOURCES["arrow"](tmp_path, columns=["b"])[1] == {"b": 2}


def test_lists_of_a_fixed_size_that_pyarrow_cannot_read_are_refused_with_the_remedy(tmp_path: Path) -> None:
    _write(tmp_path / "a.parquet", {"a": pyarrow.array([[1, 2], None], pyarrow.list_(pyarrow.int64(), 2))})
    with pytest.raises(FormatError, match=r"a\.parquet, record 0.* write the column as lists without a fixed size"):
        ParquetSource(tmp_path / "a.parquet")[0]


class _InTwoParts:
    """A row group as pyarrow gives it if a column has more than 2 GiB, which a test does not write."""

    def validate(self, full: bool) -> None: ...

    def combine_chunks(self) -> _InTwoParts:
        return self

    def to_batches(self) -> list[Any]:
        return list(pyarrow.table({"a": [1, 2]}).to_batches(1))


def test_a_row_group_that_is_too_large_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "a.parquet", {"a": [1, 2]})
    source = ParquetSource(tmp_path / "a.parquet")
    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", lambda *_, **__: _InTwoParts())
    with pytest.raises(
        FormatError, match="row group 0 cannot be read: a column has more than 2 GiB in it; write smaller"
    ):
        source[0]


def test_a_parquet_file_without_columns_has_no_records(tmp_path: Path) -> None:
    _write(tmp_path / "a.parquet", {})
    assert len(ParquetSource(tmp_path / "a.parquet")) == 0


_BY_THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from libai_data.data.sources import open_source

expected = list(open_source(sys.argv[1]))

def read(first):
    return source.read_many(range(first, len(expected), 100)) == expected[first::100]

for _ in range(12):
    source = type(open_source(sys.argv[1]))(sys.argv[1], cache_bytes=0)
    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(read, range(6)))
"""


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_threads_read_a_file_at_once(tmp_path: Path, kind: str) -> None:
    rows = range(4000)
    texts = pyarrow.array([str(row % 50) for row in rows])
    columns = {"a": rows, "b": texts, "c": texts.dictionary_encode(), "d": [[row] * (row % 3) for row in rows]}
    _write(tmp_path / f"a.{kind}", columns, 100)
    command = [sys.executable, "-c", _BY_THREADS, str(tmp_path / f"a.{kind}")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not found.returncode, found.stderr
