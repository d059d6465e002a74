"""Files of records as the formats' own packages write them, for tests that read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

import numpy as np

from libai_data.data.sources import (
    ArrayRecordSource,
    ArrowSource,
    JsonLinesSource,
    NumpySource,
    ParquetSource,
    WebDatasetSource,
)

SOURCES: dict[str, Callable[..., Any]] = {
    "array_record": ArrayRecordSource,
    "webdataset": WebDatasetSource,
    "parquet": ParquetSource,
    "arrow": ArrowSource,
    "jsonl": JsonLinesSource,
    "numpy": NumpySource,
}
ENDINGS = {
    "array_record": "array_record",
    "webdataset": "tar",
    "parquet": "parquet",
    "arrow": "arrow",
    "jsonl": "jsonl",
    "numpy": "npy",
}


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 0 to 300 characters, a few of which take two bytes."""
    random = np.random.default_rng(seed)
    return ["".join(map(chr, random.integers(32, 250, random.integers(0, 301)).tolist())) for _ in range(count)]


def write(kind: str, path: Path, contents: Sequence[str]) -> list[Any]:
    """Write contents as records of a format; returns the records that a source must give."""
    return WRITERS[kind](path, contents)


def _array_record(path: Path, contents: Sequence[str], options: str = "group_size:1") -> list[Any]:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), options)
    for content in contents:
        writer.write(content.encode())
    writer.close()
    return [content.encode() for content in contents]


def _webdataset(path: Path, contents: Sequence[str]) -> list[Any]:
    import webdataset

    found = []
    with webdataset.TarWriter(str(path)) as writer:
        for number, content in enumerate(contents):
            key = f"{path.stem}/ü{number:04d}"
            writer.write({"__key__": key, "txt": content, "Seg.cls": number})
            found.append({"__key__": key, "txt": content.encode(), "seg.cls": str(number).encode()})
    return found


def _rows(contents: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "text": content,
            "raw": content.encode(),
            "number": number,
            "real": number / 3,
            "maybe": None if number % 3 else content[:5],
            "list": list(range(number % 4)),
            "flag": number % 2 == 0,
        }
        for number, content in enumerate(contents)
    ]


def _parquet(path: Path, contents: Sequence[str]) -> list[Any]:
    import pyarrow
    from pyarrow import parquet

    rows = _rows(contents)
    parquet.write_table(pyarrow.Table.from_pylist(rows), str(path), row_group_size=7, write_page_checksum=True)
    return rows


def _arrow(path: Path, contents: Sequence[str]) -> list[Any]:
    import pyarrow

    rows = _rows(contents)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return rows


def _json_lines(path: Path, contents: Sequence[str]) -> list[Any]:
    rows: list[dict[str, Any]] = [{"text": content, "number": number} for number, content in enumerate(contents)]
    # Blank lines, a line without its end, and characters as they are and escaped.
    lines = [json.dumps(row, ensure_ascii=bool(row["number"] % 2)) for row in rows]
    path.write_text("\n".join([*lines[:2], "", "  \t", *lines[2:]]), encoding="utf-8")
    return rows


def _numpy(path: Path, contents: Sequence[str]) -> list[Any]:
    array = np.zeros((len(contents), 310), np.uint8)
    for row, content in zip(array, contents):
        row[: len(content)] = np.frombuffer(content.encode("latin-1"), np.uint8)
    np.save(path, array)
    return [{"data": row} for row in array]


WRITERS: dict[str, Callable[..., list[Any]]] = {
    "array_record": _array_record,
    "webdataset": _webdataset,
    "parquet": _parquet,
    "arrow": _arrow,
    "jsonl": _json_lines,
    "numpy": _numpy,
}


def same(found: Any, expected: Any) -> bool:
    """Whether records are equal, also those of arrays."""
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict):
        return set(found) == set(expected) and all(same(found[name], expected[name]) for name in expected)
    if isinstance(expected, np.ndarray):
        return bool(np.array_equal(found, expected)) and found.dtype == expected.dtype
    return bool(found == expected) and type(found) is type(expected)
