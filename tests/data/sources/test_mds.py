"""MDS shards of all encodings; and compressed shards of MDS and LitData. Other sources share tests with them."""

from __future__ import annotations

import json
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.data.sources import LitDataSource, MDSSource, open_source
from libai_data.data.sources.mds import decoder_of
from libai_data.errors import ConfigError, FormatError, SchemaError, StorageError
from tests.data.sources.object_store import BUCKET, ObjectStore
from tests.data.sources.record_files import ENDINGS, WRITERS, same, texts, write_mds


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "files"


def pixels(mode: str) -> tuple[np.ndarray, bytes]:
    """An image, and its raw encoding."""
    shape = (3, 2) if mode == "L" else (3, 2, 3)
    image = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    head = np.array([2, 3, len(mode)], "<u4").tobytes() + mode.encode()
    return image, head + image.tobytes()


def lists(pieces: list[bytes], first: bytes = b"") -> bytes:
    return first + np.array([len(pieces), *map(len, pieces)], "<u4").tobytes() + b"".join(pieces)


def test_all_encodings_are_decoded() -> None:
    image, raw = pixels("RGB")
    grey, raw_grey = pixels("L")
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    cases: dict[str, tuple[bytes, Any]] = {
        "bytes": (b"\0\1", b"\0\1"),
        **dict.fromkeys(("jpeg", "png"), (b"\xff\xd8", b"\xff\xd8")),
        "str": ("ü".encode(), "ü"),
        "int": (np.int64(-3).tobytes(), -3),
        "uint16": (np.uint16(65535).tobytes(), 65535),
        "float32": (np.float32(0.5).tobytes(), 0.5),
        "str_int": (b"123456789012345678901234567890", 123456789012345678901234567890),
        "str_float": (b"0.1", 0.1),
        "str_decimal": (b"0.10", Decimal("0.10")),
        "json": (b'{"a": [1, null]}', {"a": [1, None]}),
        "pil": (raw, image),
        "ndarray:int16:3,4": (array.tobytes(), array),
        "ndarray:int16": (bytes([2 << 2, 3, 4]) + array.tobytes(), array),
        "ndarray": (bytes([17, 2 << 2 | 1]) + np.array([3, 4], "<u2").tobytes() + array.tobytes(), array),
        **dict.fromkeys(("jpeg_array", "jpegarray"), (lists([b"a", b"", b"bc"]), [b"a", b"", b"bc"])),
        "list[png]": (lists([b"a", b"bc"], bytes(4)), [b"a", b"bc"]),
        "list[pil]": (lists([raw, raw_grey], bytes(4)), [image, grey]),
    }
    for encoding, (data, expected) in cases.items():
        assert same(decoder_of(encoding, "a column")(data), expected), encoding


@pytest.mark.parametrize(
    ("source", "kind", "name"), [(MDSSource, "mds", "shard.0000{}.mds"), (LitDataSource, "litdata", "chunk-0-{}.bin")]
)
def test_compressed_shards_are_those_that_are_not(
    tmp_path: Path, cache: Path, source: Any, kind: str, name: str
) -> None:
    pytest.importorskip("pyarrow")
    expected: list[Any] = []
    for form in ("raw", "zstd"):
        (tmp_path / form).mkdir()
        for number in range(3):
            records = WRITERS[kind](tmp_path / form / name.format(number), texts(20, number), form == "zstd")
            expected += records if form == "raw" else []
    raw, packed = open_source(tmp_path / "raw"), open_source(tmp_path / "zstd")
    assert same(list(raw), expected) and same(list(packed), expected)
    assert raw.shard_lengths.tolist() == packed.shard_lengths.tolist() == [20, 20, 20]
    assert same(pickle.loads(pickle.dumps(packed))[59], expected[59])
    assert len(list(cache.glob(f"*{name.format('*')}"))) == 3, "decompressed once for all processes of a node"
    chosen = source(tmp_path / "zstd", columns=["text"])
    assert same(chosen[7], {"text": expected[7]["text"]}) and chosen.identity != packed.identity
    with pytest.raises(ConfigError, match=r"no column 'txt'.*Did you mean 'text'"):
        source(tmp_path / "zstd", columns=["txt"])


def compressed(folder: Path) -> Path:
    pytest.importorskip("pyarrow")
    write_mds(folder / "a.mds", {"x": "str"}, [[text.encode()] for text in texts(30)], compress=True)
    return folder / "a.mds.zstd"


def test_damaged_compressed_shards_are_refused(tmp_path: Path) -> None:
    path = compressed(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(FormatError, match=r"a.mds.zstd (is not a zstd file, or it is cut short|has \d+ bytes)"):
        MDSSource(path)
    index = tmp_path / "index.json"
    path.write_bytes(whole)
    text = index.read_text()
    content = json.loads(text)
    content["shards"][0]["raw_data"]["hashes"] = {"sha1": "0" * 40, "xxh64": "1"}
    index.write_text(json.dumps(content))
    with pytest.raises(FormatError, match=r"the sha1 [0-9a-f]{40}; it should be 0000"):
        MDSSource(path)
    index.write_text(text.replace("zstd:3", "snappy"))
    with pytest.raises(FormatError, match="compressed by snappy; shards that are raw, or compressed by zstd, are read"):
        MDSSource(path)


def test_keys_that_json_repeats_are_refused_in_columns_and_in_the_index(tmp_path: Path) -> None:
    write_mds(tmp_path / "a.mds", {"x": "json"}, [[b'{"a": 1, "a": 2}']])
    with pytest.raises(FormatError, match=r"a\.mds, record 0, .*column 'x' cannot be read: .* the key 'a' twice"):
        MDSSource(tmp_path / "a.mds")[0]
    index = tmp_path / "index.json"
    index.write_text(index.read_text().replace('"samples":', '"samples": 3, "samples":'))
    with pytest.raises(FormatError, match=r"index\.json is no index of MDS shards.* the key 'samples' twice"):
        MDSSource(tmp_path / "a.mds")


def test_a_shard_that_an_index_lists_twice_is_refused(tmp_path: Path) -> None:
    write_mds(tmp_path / "a.mds", {"x": "str"}, [[b"text"]])
    index = tmp_path / "index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "shards": content["shards"] * 2}))
    for paths in (tmp_path, tmp_path / "a.mds"):
        with pytest.raises(FormatError, match=r"index\.json is no index of MDS shards.*lists a\.mds twice"):
            MDSSource(paths)


def test_a_compressed_shard_that_changed_is_not_read_by_workers(tmp_path: Path) -> None:
    path = compressed(tmp_path)
    sent = pickle.dumps(MDSSource(path))
    write_mds(tmp_path / "a.mds", {"x": "str"}, [[b"other"]] * 30, compress=True)
    with pytest.raises(StorageError, match="has changed since it was first opened"):
        pickle.loads(sent)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 1}, "version 1; MDS 2 is read"),
        ({"format": "json"}, "is no index of MDS shards: ValueError: a shard has the format 'json'"),
        ({"raw_data": {"basename": "../a.mds", "bytes": 1}}, "leads out of its folder"),
        ({"raw_data": {"basename": "b.mds", "bytes": 1}}, r"index.json lists .*b.mds, which is not there"),
        ({"raw_data": {"basename": "", "bytes": 1}}, "is no index of MDS shards: ValueError: a shard has no name"),
        ({"samples": 2**32 - 1}, r"a.mds has \d+ bytes, too few for the 4294967295 samples of its index"),
        ({"samples": 31}, "offset 0: it has 30 samples, where its index says 31"),
        ({"column_encodings": ["pkl"]}, r"pickled objects, which can run any code; read the other columns"),
        ({"column_encodings": ["strr"]}, r"encoded as 'strr'.*Did you mean 'str'"),
        ({"column_encodings": ["ndarray:float32:3,x"]}, r"a.mds, by its index.json, is encoded as 'ndarray:"),
        ({"column_encodings": ["json"]}, r"record 0, offset \d+: column 'x' cannot be read"),
        ({"column_names": ["x", "y"]}, "2 names of columns, but not as many encodings"),
        ({"samples": None}, "is no index of MDS shards: TypeError"),
        ({"column_encodings": [None]}, "is no index of MDS shards: TypeError: the name or encoding"),
        ({"column_names": [["x"]]}, "is no index of MDS shards: TypeError: the name or encoding"),
        ({"raw_data": {"basename": "a.mds", "bytes": 1, "hashes": 1}}, "is no index of MDS shards: TypeError"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    write_mds(tmp_path / "a.mds", {"x": "str"}, [[f"{number}!".encode()] for number in range(30)])
    content = json.loads((tmp_path / "index.json").read_text())
    content["shards"][0].update(change)
    (tmp_path / "index.json").write_text(json.dumps(content))
    with pytest.raises((ConfigError, FormatError), match=message):
        MDSSource(tmp_path)[0]


def test_shards_without_an_index_and_truncated_ones_are_refused(tmp_path: Path) -> None:
    write_mds(tmp_path / "a.mds", {"x": "str"}, [[b"1"]] * 3)
    whole = (tmp_path / "a.mds").read_bytes()
    (tmp_path / "a.mds").write_bytes(whole[:-1])
    with pytest.raises(FormatError, match=r"a.mds has \d+ bytes, where its index says \d+: it is cut short"):
        MDSSource(tmp_path)
    (tmp_path / "b.mds").write_bytes(whole)
    with pytest.raises(ConfigError, match=r"b.mds is in no index.json"):
        MDSSource(tmp_path / "b.mds")
    (tmp_path / "index.json").unlink()
    with pytest.raises(ConfigError, match=r"there is no file .*index.json"):
        MDSSource(tmp_path / "*.mds")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": "int"}, r"b\.mds has the columns {'y': 'None'}, .*a\.mds {'y': 'jpeg'}"),
        ({"x": "float32", "y": "png"}, r"b\.mds has the columns {'x': 'float32'}, .*a\.mds {'x': 'int'}"),
    ],
)
def test_shards_whose_columns_differ_are_refused_when_they_are_opened(
    tmp_path: Path, other: dict[str, str], message: str
) -> None:
    write_mds(tmp_path / "a.mds", {"x": "int", "y": "jpeg"}, [[bytes(8), b"0"]])
    write_mds(tmp_path / "b.mds", other, [[bytes(8 if other["x"] == "int" else 4), b"1"][: len(other)]])
    with pytest.raises(SchemaError, match=message):
        MDSSource(tmp_path)
    with pytest.raises(SchemaError, match=message):
        open_source(f"file://{tmp_path}", streaming=True)
    alike = [name for name in ("x", "y") if name in other and f"'{name}'" not in message]
    assert len(list(MDSSource(tmp_path, columns=alike))) == 2


def test_shards_may_have_several_encodings_of_one_kind_and_other_columns_if_they_are_empty(tmp_path: Path) -> None:
    write_mds(tmp_path / "a.mds", {"none": "str"}, [])
    write_mds(tmp_path / "b.mds", {"x": "int", "y": "jpeg"}, [[bytes(8), b"0"]])
    write_mds(tmp_path / "c.mds", {"y": "png", "x": "uint8"}, [[b"1", bytes(1)]])
    assert list(MDSSource(tmp_path)) == [{"x": 0, "y": b"0"}, {"x": 0, "y": b"1"}]


def test_an_index_of_several_folders_is_read(tmp_path: Path) -> None:
    shards = []
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
        write_mds(tmp_path / name / "a.mds", {"x": "str"}, [[f"{name}{number}".encode()] for number in range(3)])
        (entry,) = json.loads((tmp_path / name / "index.json").read_text())["shards"]
        entry["raw_data"]["basename"] = f"{name}/a.mds"
        shards.append(entry)
    (tmp_path / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    assert [record["x"] for record in open_source(tmp_path)] == ["00", "01", "02", "10", "11", "12"]


@pytest.mark.parametrize(("kind", "forms"), [("mds", (False, True)), ("litdata", (True, True))])
def test_shards_of_a_store_are_read(
    tmp_path: Path, object_store: ObjectStore, kind: str, forms: tuple[bool, bool]
) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "shards").mkdir()
    expected = []
    for number, compress in enumerate(forms):
        expected += WRITERS[kind](tmp_path / "shards" / f"{number}.{ENDINGS[kind]}", texts(9, number), compress)
    for path in (tmp_path / "shards").iterdir():
        object_store.put(f"shards/{path.name}", path.read_bytes())
    source = open_source(f"s3://{BUCKET}/shards")
    assert same(list(source), expected)
    assert same(list(pickle.loads(pickle.dumps(source))), expected)
    assert len(object_store.gets) == 3, "each object is fetched once"
