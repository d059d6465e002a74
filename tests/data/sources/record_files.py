"""Files of records as the formats' own packages write them, for tests that read them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from libai_data.data.sources import (
    ArrayRecordSource,
    ArrowSource,
    JsonLinesSource,
    LitDataSource,
    MDSSource,
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
    "mds": MDSSource,
    "litdata": LitDataSource,
}
PACKAGES = {"array_record": "array_record", "webdataset": "webdataset", "parquet": "pyarrow", "arrow": "pyarrow"}
ENDINGS = {**{kind: kind for kind in SOURCES}, "webdataset": "tar", "numpy": "npy", "litdata": "bin"}


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 0 to 300 characters, a few of which take two bytes."""
    random = np.random.default_rng(seed)
    return ["".join(map(chr, random.integers(32, 250, random.integers(0, 301)).tolist())) for _ in range(count)]


def available(kind: str) -> None:
    """Skip a test where the package that writes a format is not there."""
    if kind in PACKAGES:
        pytest.importorskip(PACKAGES[kind])


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


_SIZES = {"uint8": 1, "float64": 8}


def _mds(path: Path, contents: Sequence[str], compress: bool = False) -> list[Any]:
    rows: list[dict[str, Any]] = [
        {"flag": number % 2, "list": list(range(number % 4)), "real": number / 3, "text": content}
        for number, content in enumerate(contents)
    ]
    encoded = [
        [
            np.uint8(row["flag"]).tobytes(),
            json.dumps(row["list"]).encode(),
            np.float64(row["real"]).tobytes(),
            row["text"].encode(),
        ]
        for row in rows
    ]
    write_mds(path, {"flag": "uint8", "list": "json", "real": "float64", "text": "str"}, encoded, compress)
    return rows


def write_mds(
    path: Path, columns: Mapping[str, str], values: Sequence[Sequence[bytes]], compress: bool = False
) -> None:
    """Write encoded values as a shard of MDS, and add it to the index of its folder.

    Args:
        path: of the shard.
        columns: name -> encoding.
        values: of each sample, those of all columns.
        compress: by zstd, into a file whose name ends with ".zstd".
    """
    sizes = [_SIZES.get(encoding) for encoding in columns.values()]
    samples = [
        np.array([len(value) for value, size in zip(row, sizes) if size is None], "<u4").tobytes() + b"".join(row)
        for row in values
    ]
    described = json.dumps({"column_names": list(columns)}).encode()
    starts = np.cumsum([0, *map(len, samples)]) + 4 * len(samples) + 8 + len(described)
    shard = np.uint32(len(samples)).tobytes() + starts.astype("<u4").tobytes() + described + b"".join(samples)
    packed = None
    if compress:
        import pyarrow

        packed = pyarrow.Codec("zstd").compress(shard, asbytes=True)
        Path(f"{path}.zstd").write_bytes(packed)
    else:
        path.write_bytes(shard)
    index = path.parent / "index.json"
    shards = json.loads(index.read_text())["shards"] if index.exists() else []
    entry = {
        "column_encodings": list(columns.values()),
        "column_names": list(columns),
        "column_sizes": sizes,
        "compression": "zstd:3" if compress else None,
        "format": "mds",
        "hashes": ["sha1"],
        "raw_data": {"basename": path.name, "bytes": len(shard), "hashes": {"sha1": hashlib.sha1(shard).hexdigest()}},
        "samples": len(samples),
        "size_limit": 1 << 26,
        "version": 2,
        "zip_data": packed and {"basename": f"{path.name}.zstd", "bytes": len(packed), "hashes": {}},
    }
    shards = [each for each in shards if each["raw_data"]["basename"] != path.name] + [entry]
    shards.sort(key=lambda each: each["raw_data"]["basename"])
    index.write_text(json.dumps({"shards": shards, "version": 2}))


def _litdata(path: Path, contents: Sequence[str], compress: bool = False) -> list[Any]:
    rows: list[dict[str, Any]] = [
        {"flag": number % 2 == 0, "real": number / 3, "text": content, "place.number": number, "place.0": np.arange(3)}
        for number, content in enumerate(contents)
    ]
    encoded = [
        [
            bytes([row["flag"]]),
            np.float64(row["real"]).tobytes(),
            row["text"].encode(),
            np.int64(row["place.number"]).tobytes(),
            row["place.0"].tobytes(),
        ]
        for row in rows
    ]
    spec = tree(flag=LEAF, real=LEAF, text=LEAF, place=tree(number=LEAF, **{"0": LEAF}))
    write_litdata(path, ["bool", "float", "str", "int", "no_header_numpy:3"], spec, encoded, compress)
    return rows


LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


def tree(*items: Any, **fields: Any) -> dict[str, Any]:
    """A dict or a tuple of a sample, as PyTorch's pytree writes it in JSON."""
    kind, context = ("builtins.dict", [*fields]) if fields else ("builtins.tuple", None)
    return {"type": kind, "context": json.dumps(context), "children_spec": [*items, *fields.values()]}


def write_litdata(
    path: Path,
    encodings: Sequence[str],
    spec: Mapping[str, Any],
    values: Sequence[Sequence[bytes]],
    compress: bool = False,
    loader: str = "PyTreeLoader",
) -> None:
    """Write encoded values as a chunk of LitData, and add it to the index of its folder.

    Args:
        path: of the chunk; if it is compressed, `.zstd` comes before its ending.
        encodings: of the values of a sample.
        spec: the tree of a sample.
        values: of each sample.
        compress: by zstd.
        loader: "TokensLoader" writes no sizes.
    """
    tokens = loader == "TokensLoader"
    samples = [(b"" if tokens else np.array(list(map(len, row)), "<u4").tobytes()) + b"".join(row) for row in values]
    starts = np.cumsum([0, *map(len, samples)]) + 4 * len(samples) + 8
    chunk = np.uint32(len(samples)).tobytes() + starts.astype("<u4").tobytes() + b"".join(samples)
    if compress:
        import pyarrow

        path = path.with_suffix(".zstd.bin")
        path.write_bytes(pyarrow.Codec("zstd").compress(chunk, asbytes=True))
    else:
        path.write_bytes(chunk)
    index = path.parent / "index.json"
    chunks = json.loads(index.read_text())["chunks"] if index.exists() else []
    dim = sum(map(len, samples)) // 4 if tokens else None
    entry = {"chunk_bytes": len(chunk), "chunk_size": len(samples), "dim": dim, "filename": path.name}
    chunks = [each for each in chunks if each["filename"] != path.name] + [entry]
    config = {
        "chunk_bytes": 1 << 26,
        "chunk_size": None,
        "compression": "zstd" if compress else None,
        "data_format": list(encodings),
        "data_spec": json.dumps([1, spec]),
        "encryption": None,
        "item_loader": loader,
    }
    content = {"chunks": sorted(chunks, key=lambda each: each["filename"]), "config": config, "updated_at": "1.5"}
    index.write_text(json.dumps(content))


WRITERS: dict[str, Callable[..., list[Any]]] = {
    "array_record": _array_record,
    "webdataset": _webdataset,
    "parquet": _parquet,
    "arrow": _arrow,
    "jsonl": _json_lines,
    "numpy": _numpy,
    "mds": _mds,
    "litdata": _litdata,
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


_TIMES = count(10**18, 10**9)


def put(path: Path, content: bytes) -> None:
    """Write a file that was changed long ago, at another time than any before: sources wait for new ones to settle."""
    path.write_bytes(content)
    time = next(_TIMES)
    os.utime(path, ns=(time, time))
