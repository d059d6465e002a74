"""Chunks of LitData of all formats; other sources of records, and `test_mds`, share their tests with them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.commands.index import main as index
from libai_data.data.sources import LitDataSource, MDSSource, open_source
from libai_data.data.sources.litdata_values import decoder_of
from libai_data.errors import ConfigError, FormatError
from tests.data.sources.litdata_files import SAMPLES, row_of, sample_of, tokens_of, unpack
from tests.data.sources.object_store import BUCKET, ObjectStore
from tests.data.sources.record_files import LEAF, WRITERS, same, texts, tree, write_litdata


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "files"


def numbers(array: np.ndarray, dtype: int, order: str) -> bytes:
    """An array with its dtype and shape before it."""
    return np.array([dtype, array.ndim, *array.shape], f"{order}u4").tobytes() + array.tobytes()


def test_all_formats_are_decoded() -> None:
    array = np.arange(6, dtype=np.int16).reshape(3, 2)
    pixels = np.arange(18, dtype=np.uint8).reshape(3, 2, 3)
    pieces = np.array([2, 1, 2], "<u4").tobytes() + b"abc"
    cases: dict[str, tuple[bytes, Any]] = {
        "int": (np.int64(-3).tobytes(), -3),
        "float": (np.float64(0.1).tobytes(), 0.1),
        "bool": (b"\1", True),
        "str": ("ü".encode(), "ü"),
        "text": (b"", ""),
        **dict.fromkeys(("bytes", "jpeg", "image:png", "video:mp4", "file:npy", "pdf", "tiff"), (b"\0\1", b"\0\1")),
        "pil": (np.array([2, 3, 3], "<u4").tobytes() + b"RGB" + pixels.tobytes(), pixels),
        "jpeg_array": (pieces, [b"a", b"bc"]),
        "no_header_numpy:1": (array.tobytes(), array.ravel()),
        "no_header_numpy:13": (b"\1\0", np.array([True, False])),
        "no_header_tensor:14": (array.tobytes(), array.ravel()),
        "no_header_tensor:20": (b"", np.zeros(0, np.uint16)),
        "numpy": (numbers(array, 1, "<"), array),
        "tensor": (numbers(array, 14, ">"), array),
    }
    assert same(decoder_of("tensor", "a column")(numbers(array, 14, "<")), array), "of older versions"
    for encoding, (data, expected) in cases.items():
        assert same(decoder_of(encoding, "a column")(data), expected), encoding
    for empty in (np.array(1.5, np.float32), np.zeros((0, 3), np.float32)):
        found = decoder_of("tensor", "a column")(numbers(empty, 1, ">"))
        assert same(found, empty) and found.shape == empty.shape


@pytest.mark.parametrize(
    "encoding, message",
    [
        ("pickle", "a column contains pickled objects, which can run any code; read the other columns"),
        ("graph", "a column contains pickled objects"),
        ("strr", "a column is encoded as 'strr'; known are .*Did you mean 'str'"),
        ("no_header_tensor:10", "numpy has no bfloat16; read the other columns"),
        ("no_header_numpy:14", "there is no dtype 14"),
        ("no_header_numpy:x", "a column is encoded as 'no_header_numpy:x': invalid literal"),
    ],
)
def test_formats_that_cannot_be_read_are_refused(encoding: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decoder_of(encoding, "a column")


def small(folder: Path, samples: int = 30, name: str = "chunk-0-0.bin", **options: Any) -> Path:
    """A chunk of samples {"x": text}; returns its path."""
    folder.mkdir(exist_ok=True)
    values = [[f"{number}!".encode()] for number in range(samples)]
    write_litdata(folder / name, ["str"], tree(x=LEAF), values, **options)
    return folder / name


def change(folder: Path, **changes: Any) -> None:
    """Change an index: keys of its config, or else of its first chunk."""
    content = json.loads((folder / "index.json").read_text())
    for key, value in changes.items():
        part = content["chunks"][0] if key in content["chunks"][0] else content["config"]
        part[key] = value
    (folder / "index.json").write_text(json.dumps(content))


NAMED = tree(x=LEAF)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"filename": "../chunk-0-0.bin"}, "the name '../chunk-0-0.bin' leads out of its folder"),
        ({"filename": "/chunk-0-0.bin"}, "leads out of its folder"),
        ({"filename": "chunk-0-1.bin"}, "index.json lists .*chunk-0-1.bin, which is not there"),
        ({"filename": 3}, "is no index of LitData chunks: AttributeError"),
        (
            {"chunk_size": 31, "chunk_bytes": 10**3},
            r"chunk-0-0.bin has \d+ bytes, where its index says 1000: it is cut",
        ),
        ({"filename": ""}, "is no index of LitData chunks: ValueError: a shard has no name"),
        ({"chunk_size": 2**32 - 1}, r"chunk-0-0.bin has \d+ bytes, too few for the 4294967295 samples of its index"),
        ({"chunk_size": 31}, "offset 0: it has 30 samples, where its index says 31"),
        ({"chunk_size": -1}, "a number of samples or bytes is below 0, or too large"),
        ({"chunk_size": 10**30}, "a number of samples or bytes is below 0, or too large"),
        ({"chunk_size": None}, "is no index of LitData chunks: TypeError"),
        ({"compression": "bin"}, "compressed by bin; shards that are raw"),
        ({"compression_level": "row"}, "its compression_level is 'row'; 'chunk', 'batch' and 'sample' are read"),
        ({"compression": 4}, "is no index of LitData chunks: "),
        ({"encryption": {"algorithm": "fernet"}}, "its chunks are encrypted"),
        ({"item_loader": "ParquetLoader"}, "its chunks are for ParquetLoader; those for PyTreeLoader and TokensLoader"),
        ({"data_format": ["pickle"]}, "column 'x' of .*chunk-0-0.bin.* contains pickled objects"),
        ({"data_format": ["int"]}, r"chunk-0-0.bin, record 0, offset \d+: column 'x' cannot be read"),
        ({"data_format": ["tensor"]}, r"record 0, offset \d+: column 'x' cannot be read"),
        ({"data_format": [3]}, "is no index of LitData chunks: TypeError: the name or encoding"),
        (
            {"data_format": ["str", "int"]},
            r"data_spec has the values \['x'\], where its data_format has \['str', 'int'\]",
        ),
        ({"data_spec": None}, "is no index of LitData chunks: TypeError"),
        ({"data_spec": "[1]"}, "is no index of LitData chunks: IndexError"),
        (
            {"data_spec": json.dumps([1, {**NAMED, "type": "collections.deque"}])},
            "its samples have a collections.deque",
        ),
        ({"data_spec": json.dumps([1, {**NAMED, "context": '["x", "y"]'}])}, "1 values for the names"),
        ({"data_spec": json.dumps([1, {**NAMED, "context": "3"}])}, "is no index of LitData chunks: TypeError"),
        ({"data_spec": json.dumps([1, tree(a=tree(b=LEAF), **{"a.b": LEAF})]), "data_format": ["str"] * 2}, r"a\.b"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, changes: Any, message: str) -> None:
    small(tmp_path / "chunks")
    change(tmp_path / "chunks", **changes)
    with pytest.raises((ConfigError, FormatError), match=message):
        open_source(tmp_path / "chunks")[0]


def test_chunks_that_are_cut_short_or_whose_places_do_not_ascend_are_refused(tmp_path: Path) -> None:
    path = small(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(FormatError, match=r"chunk-0-0.bin has \d+ bytes, where its index says \d+: it is cut short"):
        LitDataSource(tmp_path)
    for place, number in ((8, 2**31), (8, 0), (4, 0), (4 + 4 * 30, len(whole) - 1)):
        changed = bytearray(whole)
        changed[place : place + 4] = np.uint32(number).tobytes()
        path.write_bytes(changed)
        with pytest.raises(FormatError, match=r"chunk-0-0.bin, offset 4: the places of its samples do not ascend"):
            LitDataSource(tmp_path)[0]
    for size in (1, 2**32 - 1):
        changed = bytearray(whole)
        changed[128:132] = np.uint32(size).tobytes()
        path.write_bytes(changed)
        with pytest.raises(FormatError, match=r"chunk-0-0.bin, record 0, offset 128: column 'x' cannot be read: "):
            LitDataSource(tmp_path)[0]
    (tmp_path / "index.json").unlink()
    with pytest.raises(ConfigError, match=r"there is no file .*index.json"):
        LitDataSource(path)


def test_an_index_of_another_format_is_refused(tmp_path: Path) -> None:
    small(tmp_path / "litdata")
    (tmp_path / "mds").mkdir()
    WRITERS["mds"](tmp_path / "mds" / "a.mds", texts(3))
    with pytest.raises(FormatError, match="is no index of MDS shards: KeyError: 'shards'"):
        MDSSource(tmp_path / "litdata")
    with pytest.raises(FormatError, match="is no index of LitData chunks: KeyError: 'config'"):
        LitDataSource(tmp_path / "mds")


def test_chunks_that_litdata_keeps_decompressed_in_its_cache_are_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    expected = WRITERS["litdata"](tmp_path / "chunk-0-0.bin", texts(20), True)
    (tmp_path / "raw").mkdir()
    WRITERS["litdata"](tmp_path / "raw" / "chunk-0-0.bin", texts(20))
    (tmp_path / "chunk-0-0.bin").write_bytes((tmp_path / "raw" / "chunk-0-0.bin").read_bytes())
    (tmp_path / "chunk-0-0.zstd.bin").unlink()
    # The index is that of the compressed chunks.
    assert same(list(open_source(tmp_path / "*.bin")), expected)
    names = ["place.0", "text"]
    assert same(LitDataSource(tmp_path / "*.bin", columns=names)[7], {name: expected[7][name] for name in names})


def test_pickled_values_are_left_out_by_columns(tmp_path: Path) -> None:
    values = [[np.int64(number).tobytes(), pickle.dumps({number})] for number in range(3)]
    write_litdata(tmp_path / "chunk-0-0.bin", ["int", "pickle"], tree(label=LEAF, raw=LEAF), values)
    with pytest.raises(FormatError, match=r"column 'raw' of .* contains pickled objects"):
        LitDataSource(tmp_path)
    assert list(LitDataSource(tmp_path, columns=["label"])) == [{"label": number} for number in range(3)]


@pytest.mark.parametrize(
    "spec, names",
    [
        (LEAF, ["0"]),
        (tree(LEAF, LEAF), ["0", "1"]),
        (tree(LEAF, tree(b=LEAF, a=tree(LEAF, LEAF))), ["0", "1.b", "1.a.0", "1.a.1"]),
    ],
)
def test_samples_of_any_form_are_records_of_their_values(tmp_path: Path, spec: Any, names: list[str]) -> None:
    write_litdata(tmp_path / "chunk-0-0.bin", ["str"] * len(names), spec, [[name.encode() for name in names]])
    assert list(LitDataSource(tmp_path)) == [{name: name for name in names}]
    assert list(LitDataSource(tmp_path)[0]) == names


def test_tokens_are_the_arrays_that_were_written(tmp_path: Path) -> None:
    documents = [np.arange(number, dtype=np.int32) for number in (3, 0, 5)]
    values = [[document.tobytes()] for document in documents]
    write_litdata(tmp_path / "chunk-0-0.bin", ["no_header_tensor:16"], LEAF, values, loader="TokensLoader")
    assert same(list(LitDataSource(tmp_path)), [{"0": document} for document in documents])
    change(tmp_path, data_spec=json.dumps([1, tree(LEAF, LEAF)]), data_format=["no_header_tensor:16"] * 2)
    with pytest.raises(FormatError, match="tokens, but 2 values in each sample"):
        LitDataSource(tmp_path)


def test_a_folder_has_the_order_of_its_index_and_a_glob_that_of_the_paths(
    tmp_path: Path, object_store: ObjectStore
) -> None:
    folder, address = tmp_path / "chunks", f"s3://{BUCKET}/shards"
    for number in (0, 1, 2, 10):
        small(folder, 1 + number, f"chunk-0-{number}.bin")
    content = json.loads((folder / "index.json").read_text())
    content["chunks"].sort(key=lambda chunk: int(chunk["chunk_size"]))
    (folder / "index.json").write_text(json.dumps(content))
    for path in folder.iterdir():
        object_store.put(f"shards/{path.name}", path.read_bytes())

    def lengths(paths: Any, **options: Any) -> list[int]:
        found: list[int] = open_source(paths, **options).shard_lengths.tolist()
        return found

    assert lengths(folder) == lengths(address, streaming=True) == [1, 2, 3, 11]
    assert lengths(folder / "*.bin") == lengths(f"{address}/*.bin", streaming=True) == [1, 2, 11, 3]
    assert lengths([folder / "chunk-0-2.bin", folder / "chunk-0-0.bin"]) == [3, 1]
    assert index([address]) == 0
    assert lengths(address, streaming=True) == [1, 2, 3, 11]
    assert lengths(f"{address}/*.bin", streaming=True) == [1, 2, 11, 3]


@pytest.mark.parametrize("compress", [False, True])
def test_sizes_without_the_head_are_those_of_versions_before_0_2_40(tmp_path: Path, compress: bool) -> None:
    pytest.importorskip("pyarrow")
    folder = tmp_path / "chunks"
    small(folder, compress=compress)
    size = json.loads((folder / "index.json").read_text())["chunks"][0]["chunk_bytes"]
    change(folder, chunk_bytes=size - 4 * 30 - 8)
    source = LitDataSource(folder)
    assert source[29] == pickle.loads(pickle.dumps(source))[29] == {"x": "29!"}
    change(folder, chunk_bytes=size - 4 * 30 - 9)
    with pytest.raises(
        FormatError, match=rf"chunk-0-0.* has {size} bytes(, where| when decompressed; there should be)"
    ):
        LitDataSource(folder)


WRITTEN = {**dict.fromkeys(("plain", "chunk", "batch", "sample"), sample_of), "table": row_of, "tokens": tokens_of}


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_litdata_has_written_is_read_in_place_and_streamed(
    tmp_path: Path, kind: str, object_store: ObjectStore
) -> None:
    pytest.importorskip("pyarrow")
    unpack(tmp_path)
    expected = [WRITTEN[kind](number) for number in range(SAMPLES)]
    source = open_source(tmp_path / kind)
    assert type(source) is LitDataSource and same(list(source), expected)
    assert [list(record) for record in source] == [list(record) for record in expected]
    assert same(list(pickle.loads(pickle.dumps(source))), expected)
    order = [4, 0, 2, 0]
    assert same(source.read_many(order), [expected[number] for number in order])
    name = [*expected[0]][-1]
    assert same(list(LitDataSource(tmp_path / kind, columns=[name])), [{name: record[name]} for record in expected])
    for path in (tmp_path / kind).iterdir():
        object_store.put(f"shards/{path.name}", path.read_bytes())
    streamed = open_source(f"s3://{BUCKET}/shards", streaming=True)
    assert same(streamed.read_many(order), [expected[number] for number in order])
    assert same(pickle.loads(pickle.dumps(streamed))[3], expected[3])


# The first two samples; of the first batch the first sample, the samples and the bytes.
_PLACES = (24, 30, 40, 44, 60)


@pytest.mark.parametrize(
    "kind, place, content, message",
    [
        ("batch", 0, b"X", "offset 0: it has no batches of 3 samples"),
        ("batch", 8, b"\2", "offset 0: it has no batches of 3 samples"),
        ("batch", 12, b"\4", "offset 0: it has no batches of 3 samples"),
        ("batch", 20, b"\0\1", "offset 40: the places of its batches are cut short"),
        *(
            ("batch", place, b"\1\1", "offset 24: the places of its samples and batches do not fit")
            for place in _PLACES
        ),
        ("batch", 48, b"\xff" * 8, "record 0, offset 0: it cannot be read: "),
        ("batch", 90, b"\xff" * 8, "record 0, offset 0: it cannot be read: "),
        ("sample", 20, b"\0", r"record 0, offset 20: it cannot be read: "),
        ("table", -12, b"\xff" * 4, "has no place for its table of 4294967295 bytes: it is cut short"),
        ("table", -12, bytes(4), "no Arrow file: it cannot be read"),
        ("table", -1, b"X", "offset 4: the places of its samples do not ascend to its end"),
    ],
)
def test_damaged_chunks_of_batches_and_tables_are_refused(
    tmp_path: Path, kind: str, place: int, content: bytes, message: str
) -> None:
    pytest.importorskip("pyarrow")
    unpack(tmp_path)
    path = tmp_path / kind / "chunk-0-0.bin"
    changed = bytearray(path.read_bytes())
    place %= len(changed)
    changed[place : place + len(content)] = content
    path.write_bytes(changed)
    with pytest.raises(FormatError, match=rf"chunk-0-0\.bin.*{message}"):
        LitDataSource(tmp_path / kind)[0]


def test_a_table_of_other_rows_than_its_index_says_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    unpack(tmp_path)
    change(tmp_path / "table", chunk_size=4)
    with pytest.raises(FormatError, match=r"chunk-0-0.bin: its table has 3 rows, where its index says 4"):
        LitDataSource(tmp_path / "table")[0]


def test_lists_and_dicts_that_are_no_longer_whole_are_refused() -> None:
    decode = decoder_of("json", "a column")
    assert decode(b'{"a": [1]}') == {"a": [1]}
    assert decode(bytes([5]) + bytes(4)) == {}
    for data in (b"", b"\x0c" + bytes(4), b"\1\xff\xff\xff\xff", b"\6\1" + bytes(7), bytes([5]) + bytes(5), b"\x0a"):
        with pytest.raises((ValueError, LookupError)):
            decode(data)
