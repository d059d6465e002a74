"""Sources of records give what the formats' own packages wrote, in any order, and from any process."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data import DataLoader
from libai_data.data.datasets import ConcatDataset
from libai_data.data.files.file_map import FileMap
from libai_data.data.samplers import SingleRoundSampler
from libai_data.data.sources import (
    ArrayRecordSource,
    ArrowSource,
    JsonLinesSource,
    NumpySource,
    ParquetSource,
    WebDatasetSource,
    open_source,
)
from libai_data.errors import ConfigError, FormatError, SampleError, SchemaError
from tests.data.sources.record_files import ENDINGS, SOURCES, WRITERS, available, same, texts, write

KINDS = sorted(SOURCES)


@pytest.mark.parametrize("kind", KINDS)
def test_records_come_as_they_were_written_in_any_order(tmp_path: Path, kind: str) -> None:
    available(kind)
    path = tmp_path / f"a.{ENDINGS[kind]}"
    expected = write(kind, path, texts(100))
    source = open_source(path)
    assert type(source) is SOURCES[kind] and len(source) == len(expected)
    order = np.random.default_rng(1).permutation(100)
    assert same(source.read_many(order), [expected[index] for index in order])
    assert same(source.__getitems__([5, 5, -1]), [expected[5], expected[5], expected[-1]])
    assert same([source[index] for index in range(100)], expected)
    assert same(pickle.loads(pickle.dumps(source))[-100], expected[0])
    with pytest.raises(IndexError, match="100 is outside the 100 records"):
        source[100]


@pytest.mark.parametrize("kind", KINDS)
def test_shards_follow_each_other_in_the_order_of_list_glob_or_folder(tmp_path: Path, kind: str) -> None:
    available(kind)
    ending = ENDINGS[kind]
    parts = {name: write(kind, tmp_path / f"{name}.{ending}", texts(9, seed)) for seed, name in enumerate("bca")}
    by_name = [record for name in "abc" for record in parts[name]]
    assert same(list(SOURCES[kind](tmp_path / f"*.{ending}")), by_name)
    assert same(list(SOURCES[kind](str(tmp_path))), by_name)
    listed = SOURCES[kind]([tmp_path / f"{name}.{ending}" for name in "ca"])
    order = np.random.default_rng(2).permutation(18)
    assert same(listed.read_many(order), [[*parts["c"], *parts["a"]][index] for index in order])


@pytest.mark.parametrize("options", ["group_size:1,uncompressed", "group_size:3", "group_size:40,brotli", "snappy"])
def test_array_records_of_all_compressions_and_groups_are_read(tmp_path: Path, options: str) -> None:
    available("array_record")
    # More than a block of 64 KiB, records that go across blocks, empty ones, and one longer than a block.
    contents = [*texts(400), "x" * 200000, "", *texts(100, 1)]
    expected = WRITERS["array_record"](tmp_path / "a", contents, options)
    order = np.random.default_rng(1).permutation(len(expected))
    assert ArrayRecordSource(tmp_path / "a").read_many(order) == [expected[index] for index in order]


def test_a_dataset_saved_by_datasets_is_read_and_splits_are_told_of(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": text, "label": number} for number, text in enumerate(texts(50))]
    dataset = datasets.Dataset.from_list(rows)
    dataset.shuffle(seed=1).save_to_disk(str(tmp_path / "one"), num_shards=3)
    source = open_source(tmp_path / "one")
    assert isinstance(source, ArrowSource) and list(source) == list(dataset.shuffle(seed=1))
    datasets.DatasetDict(train=dataset).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ConfigError, match=r"several splits; name the folder of one.*train"):
        ArrowSource(tmp_path / "splits")
    assert ArrowSource(tmp_path / "splits" / "train", columns=["label"])[7] == {"label": 7}


def test_columns_of_any_type_are_read_without_pandas(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    numbers = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"]
    columns = {name: pyarrow.array([3, 0, 1, 2], getattr(pyarrow, name)()) for name in numbers}
    columns["half"] = pyarrow.array(np.array([0.5, 1, 2, 3], np.float16))
    columns["flag"] = pyarrow.array([True, False, True, True])
    columns["text"], columns["bytes"] = pyarrow.array(["a", "", "ä", "d"]), pyarrow.array([b"a", b"", b"\xff", b"d"])
    columns["holes"], columns["lists"] = pyarrow.array([1, None, 3, 4]), pyarrow.array([[1], [], [2, 3], None])
    columns["days"] = pyarrow.array([0, 1, 2, 3], pyarrow.date32())
    table = pyarrow.table(columns)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_batch(table.to_batches()[0].slice(1))
    code = "import sys; from libai_data.data.sources import open_source; records = [*open_source(sys.argv[1])]; "
    code += "assert 'pandas' not in sys.modules; print(repr(records))"
    for name, expected in (("a.parquet", table.to_pylist()), ("a.arrow", table.to_pylist()[1:])):
        ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], capture_output=True, text=True)
        assert ended.stdout.splitlines()[-1:] == [repr(expected)], ended.stderr


def test_parquet_decodes_row_groups_again_that_found_no_room(tmp_path: Path) -> None:
    available("parquet")
    expected = write("parquet", tmp_path / "a", texts(60))
    source = ParquetSource(tmp_path / "a", cache_bytes=1)
    assert source.read_many(range(59, -1, -1)) == expected[::-1]


def test_arrays_of_npz_and_of_several_files_are_fields(tmp_path: Path) -> None:
    x, y = np.arange(12.0).reshape(6, 2), np.asfortranarray(np.arange(24, dtype=np.int32).reshape(6, 4))
    np.savez(tmp_path / "stored.npz", x=x, y=y)
    np.savez_compressed(tmp_path / "packed.npz", x=x, y=y)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    rows = [{"x": each, "y": other} for each, other in zip(x, y)]
    both: dict[str, Any] = {"x": tmp_path / "x.npy", "y": tmp_path / "y.npy"}
    for paths in (tmp_path / "stored.npz", tmp_path / "packed.npz", both):
        source = NumpySource(paths)
        assert same(list(source), rows)
        out: dict[str, np.ndarray] = {"x": np.zeros((3, 2)), "y": np.zeros((3, 4), np.int32)}
        source.read_batch(np.array([5, 0, 5]), out)
        assert same(out, {"x": x[[5, 0, 5]], "y": y[[5, 0, 5]]})
    base: Any = NumpySource(tmp_path / "stored.npz")._shards[0].arrays["x"]
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base, FileMap)


def test_arrays_that_do_not_fit_are_refused_with_their_shapes(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(3), y=np.zeros(4))
    with pytest.raises(SchemaError, match=r"equally many rows; there are {'x': 3, 'y': 4}"):
        NumpySource(tmp_path / "a.npz")
    np.save(tmp_path / "1.npy", np.zeros((3, 2)))
    np.save(tmp_path / "2.npy", np.zeros((3, 1)))
    with pytest.raises(SchemaError, match=r"the shards differ: .*2.npy has .*\(1,\)"):
        NumpySource(tmp_path / "*.npy")
    np.save(tmp_path / "objects", np.array([object()]), allow_pickle=True)
    with pytest.raises(FormatError, match=r"objects.npy, offset 0: no .npy file of numbers"):
        NumpySource(tmp_path / "objects.npy")


def test_json_that_is_no_object_is_refused_with_record_and_offset(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n[2]\n{"a": \n')
    source = JsonLinesSource(tmp_path / "a.jsonl")
    assert source[0] == {"a": 1}
    with pytest.raises(FormatError, match=r"a.jsonl, record 1, offset 9: a JSON list, but .*`jq -c"):
        source[1]
    with pytest.raises(FormatError, match=r"a.jsonl, record 2, offset 13: not JSON[^;]*$"):
        source[2]
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"a.jsonl.gz is compressed.*decompress it first"):
        open_source(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_json_end_in_each_of_the_three_ways(tmp_path: Path, end: str) -> None:
    lines = ['{"a": 1}', "", ' {"a": 2} ', " ", '{"a": 3', '{"a": "ü"}']
    (tmp_path / "a.jsonl").write_bytes(("\ufeff" + end.join(lines) + end).encode())
    source = JsonLinesSource(tmp_path / "a.jsonl")
    assert len(source) == 4 and [source[0], source[1], source[3]] == [{"a": 1}, {"a": 2}, {"a": "ü"}]
    offset = len(("\ufeff" + end.join(lines[:4]) + end).encode())
    with pytest.raises(FormatError, match=rf"a.jsonl, record 2, offset {offset}: not JSON[^;]*$"):
        source[2]


def test_a_repeated_key_of_an_object_is_refused_with_file_line_and_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": {"a": 2}}\n{"x": [{"a": 1, "c": 2, "a": 3}]}\n')
    source = JsonLinesSource(tmp_path / "a.jsonl")
    assert source[0] == {"a": 1, "b": {"a": 2}}
    with pytest.raises(FormatError, match=r"a.jsonl, record 1, offset 24: not JSON: an object has the key 'a' twice"):
        source[1]


def test_another_file_of_equal_size_and_time_is_named_as_such_by_its_lines(tmp_path: Path) -> None:
    for content in ('{"a":11}\n{"b":2}\n{"a":[1]}', '{"a":1}\n{"b":22}\n{"a":1}\n1'):
        (tmp_path / "a.jsonl").write_text(content)
        os.utime(tmp_path / "a.jsonl", ns=(1, 1))
        source = JsonLinesSource(tmp_path / "a.jsonl")
    for index in (1, 2):
        with pytest.raises(FormatError, match=r"not JSON.* another file .*: set LIBAI_DATA_FILE_IDENTITY=content$"):
            source[index]


def test_an_archive_of_equal_size_and_time_with_other_members_is_refused_by_its_headers(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    for names in (("a.txt", "a.cls", "b.txt"), ("a.txt", "c.txt", "b.txt")):
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(name))
        os.utime(path, ns=(1, 1))
        source = WebDatasetSource(path)
        assert source[1] == {"__key__": "b", "txt": b""}
    for read in (lambda: source[0], lambda: source.read_many([1, 0])):
        with pytest.raises(
            FormatError, match=r"a.tar, record 0, offset 512: .*: set LIBAI_DATA_FILE_IDENTITY=content$"
        ):
            read()


def test_formats_that_names_do_not_tell_must_be_named(tmp_path: Path) -> None:
    expected = write("jsonl", tmp_path / "records", texts(3))
    with pytest.raises(ConfigError, match="belong to no single format; name the files by a glob, or the format: "):
        open_source(tmp_path / "records")
    write("jsonl", tmp_path / "lines.json", texts(3))
    with pytest.raises(ConfigError, match=r"lines.json end with \['.json'\], which belong to no single format"):
        open_source(tmp_path / "lines.json")
    with pytest.raises(ConfigError, match=r"no format 'json'.*Did you mean 'jsonl'"):
        open_source(tmp_path / "records", "json")
    assert list(open_source(tmp_path / "records", "jsonl")) == expected
    assert list(open_source((tmp_path / "records").rename(tmp_path / "RECORDS.JSONL"))) == expected


def test_arrays_of_other_dtypes_and_shapes_are_not_cast_or_repeated_into_a_batch(tmp_path: Path) -> None:
    rows = {"ints": np.arange(4), "floats": np.arange(4) + 0.5, "small": np.arange(4, dtype=np.uint8)}
    pairs, single = np.zeros((4, 2)), np.zeros((4, 1))
    for name, array in {**rows, "pairs": pairs, "single": single}.items():
        np.save(tmp_path / name, array)
    for first, second in (("ints", "floats"), ("small", "ints"), ("pairs", "single")):
        both = ConcatDataset([NumpySource(tmp_path / f"{name}.npy") for name in (first, second)])
        with pytest.raises(SampleError, match=r"sample \d of ConcatDataset has another schema"):
            list(DataLoader(both, SingleRoundSampler(both, 2)))


def test_capital_suffixes_of_archives_of_arrays_are_recognised(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    (tmp_path / "a.npz").rename(tmp_path / "A.NPZ")
    assert open_source(tmp_path / "A.NPZ")[2] == {"x": 2}


def test_a_file_of_several_arrays_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "a.npy", "wb") as file:
        np.save(file, np.arange(3))
        np.save(file, np.arange(4))
    with pytest.raises(FormatError, match=r"a\.npy.*a file with several arrays cannot be read"):
        NumpySource(tmp_path / "a.npy")


def test_streams_of_arrow_that_were_joined_are_refused(tmp_path: Path) -> None:
    available("arrow")
    write("arrow", tmp_path / "a", texts(9))
    (tmp_path / "b.arrow").write_bytes((tmp_path / "a").read_bytes() * 2)
    with pytest.raises(FormatError, match=r"b\.arrow.*more data follows the end of the stream"):
        SOURCES["arrow"](tmp_path / "b.arrow")


@pytest.mark.parametrize("kind", ["arrow", "parquet", "npz"])
@pytest.mark.parametrize("sizes", [(9, 9), (9, 5), (5, 9), (9, 0), (9, 9, 9)])
def test_files_with_a_footer_that_were_joined_are_refused(tmp_path: Path, kind: str, sizes: tuple[int, ...]) -> None:
    files = [tmp_path / f"{number}.{kind}" for number in range(len(sizes))]
    for file, size in zip(files, sizes):
        rows = np.arange(size)
        if kind == "npz":
            np.savez(file, x=rows)
            continue
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = pyarrow.table({"x": rows})
        if kind == "parquet":
            parquet.write_table(table, file, row_group_size=3, write_page_index=True)
        else:
            with pyarrow.OSFile(str(file), "wb") as out, pyarrow.ipc.new_file(out, table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
    for file, size in zip(files, sizes):
        assert len(open_source(file)) == size
    joined = tmp_path / f"joined.{kind}"
    joined.write_bytes(b"".join(file.read_bytes() for file in files))
    with pytest.raises(FormatError, match=rf"joined\.{kind}.*(follows|precedes)"):
        open_source(joined)


def test_views_of_text_and_bytes_are_read_also_within_lists(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows = {"text": ["a", None, "longer than twelve bytes"], "bytes": [b"a", b"b", b"longer than twelve bytes"]}
    kinds = {"text": pyarrow.string_view(), "bytes": pyarrow.binary_view()}
    columns = {name: pyarrow.array(values).cast(kinds[name]) for name, values in rows.items()}
    columns["within"] = pyarrow.ListArray.from_arrays([0, 1, 1, 3], columns["bytes"])
    table = pyarrow.table(columns)
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as out, pyarrow.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    assert ArrowSource(tmp_path / "a.arrow").read_many([2, 0, 1]) == [table.to_pylist()[row] for row in (2, 0, 1)]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_views_within_lists_and_structs_are_read(tmp_path: Path, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    view = pyarrow.string_view()
    rows = [{"a": ["x" * 20, None], "b": {"c": "y"}}, {"a": [], "b": {"c": "y" * 20}}, {"a": None, "b": None}]
    schema = pyarrow.schema({"a": pyarrow.list_(view), "b": pyarrow.struct({"c": view})})
    table = pyarrow.Table.from_pylist(rows, schema)
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        try:
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        except pyarrow.ArrowTypeError:
            pytest.skip("views in Parquet files need pyarrow 22")
    else:
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    assert SOURCES[kind](path).read_many([2, 0, 1]) == [rows[row] for row in (2, 0, 1)]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_refused_with_the_file(tmp_path: Path, kind: str) -> None:
    available(kind)
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2]), pyarrow.array([3])], ["x", "x", "y"])
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(FormatError, match=rf"a\.{kind} has several columns 'x'"):
        SOURCES[kind](path)
    assert SOURCES[kind](path, columns=["y"])[0] == {"y": 3}


@pytest.mark.parametrize("indices", [[True, False, True], np.array([1.9]), [[0, 1]], ["1"]])
def test_indices_that_are_no_ints_are_refused(tmp_path: Path, indices: Any) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write("jsonl", tmp_path / name, texts(3))
    for source in (SOURCES["jsonl"](tmp_path / "a.jsonl"), SOURCES["jsonl"](tmp_path / "*.jsonl")):
        with pytest.raises(TypeError, match=r"the indices of records of JsonLinesSource are"):
            source.read_many(indices)
        with pytest.raises(IndexError, match=r"outside"):
            source.read_many(np.array([2**64 - 1], np.uint64))
        assert source.read_many([]) == []


def test_rows_of_a_compressed_archive_cannot_be_overwritten(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((3, 2)))
    with pytest.raises(ValueError, match="read-only"):
        NumpySource(tmp_path / "a.npz")[1]["x"][0] = 1


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_that_only_the_names_of_folders_have_are_named_in_a_warning(
    tmp_path: Path, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for year in (2023, 2024):
        (tmp_path / f"year={year}").mkdir()
        table = pyarrow.table({"a": [year]})
        parquet.write_table(table, tmp_path / f"year={year}" / "a.parquet")
    folder = f"file://{tmp_path}"
    assert list(open_source(folder, "parquet", streaming)) == [{"a": 2023}, {"a": 2024}]
    [message] = [record.getMessage() for record in caplog.records if "folders" in record.getMessage()]
    assert message.startswith("The rows have no ['year']")


@pytest.mark.parametrize("log", ["_delta_log/0.json", "metadata/1.metadata.json", ".hoodie/hoodie.properties"])
def test_files_of_a_table_with_a_log_are_refused_but_if_they_are_listed(tmp_path: Path, log: str) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data" / "year=2024" / "a.parquet"
    for each in (path, tmp_path / log):
        each.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.table({"a": [1]}), path)
    (tmp_path / log).touch()
    for pattern in ("", "data/*/*.parquet"):
        with pytest.raises(ConfigError, match=r"belongs to a table with the log .*give the list of its current files"):
            ParquetSource(tmp_path / pattern)
    if not log.startswith("."):
        with pytest.raises(ConfigError, match="belongs to a table with the log"):
            open_source(f"file://{tmp_path}", "parquet", streaming=True)
    assert list(ParquetSource([path])) == [{"a": 1}]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_changed_bytes_of_an_archive_of_arrays_are_noticed_by_its_checksums(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.npz", x=np.arange(1000))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[700] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(FormatError, match=r"a\.npz, array 'x.npy'"):
        NumpySource(tmp_path / "a.npz")


_OPEN = """
import sys
from libai_data.data.sources import ParquetSource
from libai_data.errors import FormatError
try:
    ParquetSource(sys.argv[1])
except FormatError as error:
    print(error)
"""


def test_columns_of_a_parquet_file_that_are_encrypted_are_refused_without_the_end_of_the_process(
    tmp_path: Path,
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):  # type: ignore[name-defined]
        def wrap_key(self, key: bytes, name: str) -> bytes:
            return base64.b64encode(key)

    factory, keys = encryption.CryptoFactory(lambda _: Keys()), encryption.KmsConnectionConfig()
    how = encryption.EncryptionConfiguration(footer_key="f", column_keys={"c": ["a"]}, plaintext_footer=True)
    table = pyarrow.table({"a": [1], "b": [2]})
    properties = factory.file_encryption_properties(keys, how)
    with parquet.ParquetWriter(tmp_path / "a.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    command = [sys.executable, "-c", _OPEN, str(tmp_path / "a.parquet")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "a.parquet, offset" in found.stdout and "encrypted files are not supported" in found.stdout, found.stderr
