"""Conversion: every record of the source, in order, as the formats' own readers see it, however often it is ended."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.commands.conversion import Conversion, Converted, convert, main, shard_writers
from libai_data.commands.conversion.conversion import ConversionError, ShardJob, WriteShard
from libai_data.commands.conversion.shard_writers import FORMATS, schema_of
from libai_data.data.sources import open_source, sharded, unpack_record
from libai_data.data.sources.manifest import MANIFEST, UNFINISHED
from libai_data.data.sources.storage import listed
from libai_data.errors import ConfigError, FormatError, SchemaError
from tests.data.sources.record_files import ENDINGS, SOURCES, same, texts, write

pytest.importorskip("array_record")
pytest.importorskip("pyarrow")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."}


def as_source_has_it(to: str, found: list[Any], expected: list[Any]) -> bool:
    if to == "array_record":
        return same([record if type(expected[0]) is bytes else unpack_record(record) for record in found], expected)
    if type(expected[0]) is bytes:
        return same([record["bin" if to == "webdataset" else "record"] for record in found], expected)
    if to == "parquet":
        return same(
            found, [{n: v.tolist() if hasattr(v, "tolist") else v for n, v in each.items()} for each in expected]
        )
    return same([decoded(record, expected[0]) for record in found], expected)


def decoded(sample: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ending, content in sample.items():
        name, _, kind = ending.rpartition(".")
        if ending == "__key__" and "__key__" not in like:
            continue
        if ending in like:
            found[ending] = content
        elif kind == "txt":
            found[name] = content.decode()
        elif kind == "npy":
            found[name] = np.load(io.BytesIO(content))
        else:
            found[name] = json.loads(content)
    return found


@pytest.mark.parametrize("kind", sorted(SOURCES))
def test_every_source_becomes_every_kind_of_shards(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{ENDINGS[kind]}"
    expected = write(kind, path, texts(23))
    if kind in ("parquet", "arrow"):
        # JSON has no bytes within lists, but all else.
        expected = list(open_source(path))
    for to in FORMATS:
        for first, stop in ((0, 12), (12, 23)):
            folder = tmp_path / to
            folder.mkdir(exist_ok=True)
            job = ShardJob(str(folder / f"{first:02d}.{FORMATS[to].ending}"), first, stop)
            identity = open_source(path).identity
            report = WriteShard(path, "", to, schema_of(to, lambda: expected), str(folder), identity)(job)[0]
            assert report.records == stop - first
        assert as_source_has_it(to, list(open_source(folder)), expected)


def test_the_formats_own_readers_read_the_shards(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    from array_record.python.array_record_data_source import ArrayRecordDataSource
    from pyarrow import parquet

    expected = write("jsonl", tmp_path / "a.jsonl", texts(30))
    paths = {}
    for to in FORMATS:
        result = convert(Conversion([str(tmp_path / "a.jsonl")], to, tmp_path / to, records_per_shard=11), workers=1)
        assert (result.records, len(result.paths), result.kept) == (30, 3, 0)
        paths[to] = result.paths
    records = ArrayRecordDataSource(paths["array_record"])
    assert [unpack_record(records[index]) for index in range(30)] == expected
    assert [row for path in paths["parquet"] for row in parquet.read_table(path).to_pylist()] == expected
    samples = [
        sample for path in paths["webdataset"] for sample in webdataset.WebDataset(path, shardshuffle=False).decode()
    ]
    assert [sample["__key__"] for sample in samples] == [f"{index:09d}" for index in range(30)]
    # What is text is a file of text by its name.
    assert [{"text": sample["text.txt"], "number": sample["number.json"]} for sample in samples] == expected


def converted(tmp_path: Path, workers: int = 1, **changed: Any) -> Converted:
    """Convert `a.jsonl` into tar shards of 20."""
    options: dict[str, Any] = {"to": "webdataset", "output": tmp_path / "out", "records_per_shard": 20, **changed}
    return convert(Conversion([str(tmp_path / "a.jsonl")], **options), workers)


def test_shards_do_not_depend_on_workers_and_a_second_run_keeps_them_but_those_that_are_gone(tmp_path: Path) -> None:
    write("jsonl", tmp_path / "a.jsonl", texts(70))
    first, second = converted(tmp_path), converted(tmp_path, 2, output=tmp_path / "two")
    whole = contents(tmp_path / "out")
    assert len(whole) == 4 and contents(tmp_path / "two") == whole and first.size == second.size
    Path(first.paths[2]).unlink()
    Path(first.paths[1]).write_bytes(b"short")
    damaged = bytearray(Path(first.paths[0]).read_bytes())
    damaged[512] ^= 1  # of the first field
    Path(first.paths[0]).write_bytes(damaged)
    again = converted(tmp_path)
    assert again.kept == 1 and contents(tmp_path / "out") == whole and again.size == first.size


@pytest.mark.parametrize("changed", [{"records_per_shard": 10}, {"to": "parquet"}, {"name": "other"}, "records"])
def test_shards_of_another_conversion_are_not_mixed_with(tmp_path: Path, changed: Any) -> None:
    write("jsonl", tmp_path / "a.jsonl", texts(5))
    converted(tmp_path)
    before = contents(tmp_path / "out")
    if changed == "records":
        write("jsonl", tmp_path / "a.jsonl", texts(6))
    told = changed if changed == "records" else next(iter(changed))
    with pytest.raises(ConfigError, match=rf"out contains shards of another run: {told} was .*, or remove the folder"):
        converted(tmp_path, **({} if changed == "records" else changed))
    assert contents(tmp_path / "out") == before and len(open_source(tmp_path / "out")) == 5


def test_shards_are_written_again_if_a_file_they_were_made_of_has_changed(tmp_path: Path) -> None:
    for name in "abcd":
        write("jsonl", tmp_path / f"{name}.jsonl", texts(20, seed=ord(name)))
    paths = [str(tmp_path / f"{name}.jsonl") for name in "abcd"]

    def again(output: str = "out") -> Converted:
        return convert(Conversion(paths, "webdataset", tmp_path / output, records_per_shard=20))

    again()
    corrected = tmp_path / "b.jsonl"
    corrected.write_text(corrected.read_text().replace('"number": 7', '"number": 9'))
    os.utime(corrected, ns=(0, 1))
    assert again().kept == 3
    # The same bytes at another place in the records.
    os.rename(tmp_path / "c.jsonl", tmp_path / "x.jsonl")
    os.rename(tmp_path / "d.jsonl", tmp_path / "c.jsonl")
    os.rename(tmp_path / "x.jsonl", tmp_path / "d.jsonl")
    assert again().kept == 2 and again().kept == 4
    again("whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_source_that_changes_while_it_is_converted_ends_the_run_and_the_next_run_is_right(tmp_path: Path) -> None:
    write("jsonl", tmp_path / "a.jsonl", texts(40))
    conversion = Conversion([str(tmp_path / "a.jsonl")], "webdataset", tmp_path / "out", records_per_shard=20)

    def change(done: int, total: int) -> None:
        if done == 20:
            write("jsonl", tmp_path / "new", texts(40, seed=1))
            os.replace(tmp_path / "new", tmp_path / "a.jsonl")

    with pytest.raises(
        ConversionError, match=r"records 20 to 39. changed while it was read; run the same command again"
    ):
        convert(conversion, 1, change)
    convert(conversion)
    converted(tmp_path, output=tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_file_that_comes_into_the_folder_of_the_input_is_noticed_by_the_processes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write("jsonl", tmp_path / "in" / "b.jsonl", texts(4))

    def add_a_file(done: int, total: int) -> None:
        write("jsonl", tmp_path / "in" / "a.jsonl", texts(4, seed=1))

    with pytest.raises(ConversionError, match=r"the files of .*in changed since the conversion began; start it again"):
        convert(Conversion([str(tmp_path / "in")], "webdataset", tmp_path / "out"), 1, add_a_file)


SLOW = """
import sys
from libai_data.commands.conversion import convert
from libai_data.commands.conversion import Conversion
told = []
def tell(done, total):
    told.append(done)
    if len(told) == int(sys.argv[3]):
        print(done, flush=True)
        sys.stdin.read()
convert(Conversion([sys.argv[1]], "webdataset", sys.argv[2], records_per_shard=20), 2, tell)
"""


@pytest.mark.slow
def test_after_kill_9_the_same_call_keeps_the_finished_shards_and_gives_the_same_bytes(tmp_path: Path) -> None:
    write("jsonl", tmp_path / "a.jsonl", texts(800))
    converted(tmp_path, output=tmp_path / "whole")
    command = [sys.executable, "-c", SLOW, str(tmp_path / "a.jsonl"), str(tmp_path / "out")]
    for after in (3, 10):
        process = subprocess.Popen([*command, str(after)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        process.kill()
        process.communicate()
        assert not (tmp_path / "out" / ".libai_data_manifest.json").exists()
    result = converted(tmp_path)
    assert result.kept >= 9
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out" / ".libai_data_parts").exists()


def test_a_folder_without_all_its_shards_is_refused(tmp_path: Path) -> None:
    write("jsonl", tmp_path / "a.jsonl", texts(60))
    paths = converted(tmp_path).paths
    assert len(open_source(tmp_path / "out")) == 60
    Path(paths[1]).unlink()
    for folder in ({"paths": tmp_path / "out"}, {"paths": f"file://{tmp_path}/out", "streaming": True}):
        with pytest.raises(ConfigError, match=r"has no .*records-00001-of-00003.tar, which its manifest lists"):
            open_source(**folder)
    assert len(open_source(tmp_path / "out" / "*.tar")) == 40
    (tmp_path / "out" / MANIFEST).unlink()
    (tmp_path / "out" / UNFINISHED).mkdir()
    with pytest.raises(ConfigError, match=r"'libai-data convert' did not finish the shards in .*out"):
        open_source(tmp_path / "out")


def test_a_folder_in_which_a_conversion_begins_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("jsonl", tmp_path / "a.jsonl", texts(9))

    def begun(paths: Any) -> list[str]:
        (tmp_path / UNFINISHED).mkdir()
        return listed(paths)

    monkeypatch.setattr(sharded, "listed", begun)
    with pytest.raises(ConfigError, match="'libai-data convert' did not finish the shards in "):
        FORMATS["parquet"].source(tmp_path)


@pytest.mark.parametrize("streaming", [False, True])
def test_shards_that_were_moved_into_subfolders_are_read_and_others_of_their_names_refused(
    tmp_path: Path, streaming: bool
) -> None:
    write("jsonl", tmp_path / "a.jsonl", texts(60))
    paths = [Path(path) for path in converted(tmp_path).paths]
    expected = list(open_source(tmp_path / "out"))
    for number, path in enumerate(paths):
        (tmp_path / "out" / f"{number}").mkdir()
        path.rename(tmp_path / "out" / f"{number}" / path.name)
    folder = f"file://{tmp_path}/out"
    assert list(open_source(folder, streaming=streaming)) == expected
    with pytest.raises(ConfigError, match=r"3.tar was moved here from .*, so its records would .* twice; move it back"):
        converted(tmp_path)
    assert list(open_source(folder, streaming=streaming)) == expected
    (tmp_path / "out" / "1" / paths[1].name).write_bytes(b"short")
    with pytest.raises(FormatError, match=r"1/records-00001-of-00003.tar has 5 bytes, but .* manifest beside it says"):
        open_source(folder, streaming=streaming)
    (tmp_path / "out" / "1" / paths[1].name).unlink()
    with pytest.raises(ConfigError, match=r"has no records-00001-of-00003.tar, which its manifest lists"):
        open_source(folder, streaming=streaming)


def test_a_shard_that_does_not_read_back_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("jsonl", tmp_path / "a.jsonl", texts(5))
    path = str(tmp_path / "a.jsonl")
    write_shard = WriteShard(path, "", "webdataset", None, str(tmp_path), open_source(path).identity)
    fsync = os.fsync

    def damage(descriptor: int) -> None:
        fsync(descriptor)
        os.pwrite(descriptor, b"?", 512)  # The first byte of the first field.

    monkeypatch.setattr(os, "fsync", damage)
    with pytest.raises(FormatError, match=r"x.tar: the shard of records 0 to 5 does not read back"):
        write_shard(ShardJob(str(tmp_path / "x.tar"), 0, 5))
    assert [path.name for path in tmp_path.glob("*x.tar*")] == []


def test_a_record_that_cannot_be_read_ends_the_run_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * 30 + "[]\n" + '{"a": 1}\n' * 30)
    with pytest.raises(
        ConversionError, match=r"(?s)records-00002-of-00004.tar .records 30 to 44.*record 30, offset 270"
    ):
        converted(tmp_path)


def test_shards_never_overwrite_the_input(tmp_path: Path) -> None:
    write("jsonl", tmp_path / "a.jsonl", texts(4))
    convert(Conversion([str(tmp_path / "a.jsonl")], "parquet", tmp_path / "out", records_per_shard=2))
    (tmp_path / "out" / MANIFEST).unlink()
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(
        ConfigError, match=r"out/records-00000-of-00002.parquet is an input, which a shard would overwr"
    ):
        convert(Conversion([str(tmp_path / "out" / "*.parquet")], "parquet", tmp_path / "link", records_per_shard=2))
    for output in ("link", "out/new"):
        with pytest.raises(
            ConfigError, match=rf"{output} is in the input folder .*out, so that its shards would be in"
        ):
            convert(Conversion([str(tmp_path / "out")], "parquet", tmp_path / output, name="new"))
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    for name in ("../b", "", ".b"):
        with pytest.raises(ConfigError, match=f"name is '{name}'; it must be a name without '/'"):
            Conversion(["a.jsonl"], "parquet", tmp_path, name=name)


def test_the_command_tells_what_it_made_and_what_it_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("jsonl", tmp_path / "a.jsonl", texts(5))
    command = [str(tmp_path / "a.jsonl"), "--to", "parquet", "--output", str(tmp_path / "out")]
    assert main(command) == 0
    assert "5 records in 1 shards of" in capsys.readouterr().out
    assert main(command) == 0
    assert "1 shards were kept from an earlier run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([{"__key__": "k", "a": 1}, {"__key__": "k", "b": 1}], r"record 1 \(key 'k'\) has the key of an earlier one"),
        ([{"a": 1}, {}], r"record 1 .* has no field"),
        ([{"__key__": "./k", "a": 1}], r"key './k' cannot be a key"),
        ([{"__key__": "__meta__/k", "a": 1}], r"key '__meta__/k' cannot be a key"),
        ([{"__key__": "k\0", "a": 1}], r"key 'k\\x00' cannot be a key"),
        ([{"a\0": 1}], r"field 'a\\x00' would be a file with the ending 'a\\x00.json'"),
    ],
)
def test_records_that_a_tar_would_join_lose_or_rename_are_refused(tmp_path: Path, records: Any, why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        FORMATS["webdataset"].writer(tmp_path / "a.tar", None).write(records, 0)


def test_a_field_that_fits_no_column_of_parquet_is_named() -> None:
    with pytest.raises(SchemaError, match=r"the field 'b' of the first 2 records fits no column of Parquet"):
        schema_of("parquet", lambda: [{"a": 1, "b": 1}, {"a": 2, "b": "x"}])
    with pytest.raises(SchemaError, match=r"the field 'c' of the first 1 records .* no child field"):
        schema_of("parquet", lambda: [{"a": 1, "c": [{}]}])


@pytest.mark.parametrize("dtype", ["M8[ns]", "m8[M]", "i4,f8"])
def test_values_of_numpy_that_parquet_would_store_as_other_ones_are_refused(dtype: str) -> None:
    with pytest.raises(SchemaError, match=r"field 't' has values of the dtype .* or convert to another format"):
        schema_of("parquet", lambda: [{"t": np.zeros((2, 2), dtype)}])
    for kept in ("M8[us]", "m8[s]", "M8[D]", "V3", "S3"):
        assert schema_of("parquet", lambda: [{"t": np.zeros((2, 2), kept)}]).names == ["t"]  # noqa: B023


def test_texts_of_bytes_by_numpy_become_bytes_of_a_tar(tmp_path: Path) -> None:
    (sample,) = FORMATS["webdataset"].writer(tmp_path / "a.tar", None).write([{"data": np.bytes_(b"one")}], 0)
    assert type(sample["data"]) is bytes


def test_large_records_make_small_row_groups_of_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(shard_writers, "_ROW_GROUP_BYTES", 4000)
    records = [{"a": b"x" * 1000} for _ in range(20)]
    writer = FORMATS["parquet"].writer(tmp_path / "a.parquet", schema_of("parquet", lambda: records))
    for first in (0, 2, 4, 6):
        writer.write(records[first : first + 2], first)
    writer.write(records[8:], 8)
    writer.close()
    metadata = parquet.read_metadata(tmp_path / "a.parquet")
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    assert sum(sizes) == 20 and max(sizes) <= 4
    assert list(open_source(tmp_path / "a.parquet")) == records


def test_records_without_fields_are_no_rows_of_parquet() -> None:
    with pytest.raises(SchemaError, match="the first 2 records have no fields; Parquet cannot store them"):
        schema_of("parquet", lambda: [{}, {}])


def test_arrays_of_any_strides_become_array_records(tmp_path: Path) -> None:
    x = np.arange(24).reshape(2, 3, 4)
    np.save(tmp_path / "x.npy", np.asfortranarray(x))
    convert(Conversion([str(tmp_path / "x.npy")], "array_record", tmp_path / "out"))
    found = [unpack_record(record)["data"] for record in open_source(tmp_path / "out")]
    assert np.array_equal(found, x)


def test_a_conversion_of_no_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no files are given"):
        convert(Conversion([], "webdataset", tmp_path / "out"))
