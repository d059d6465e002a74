"""Damaged files of records: an error that names the file, or the right records; never others, never a crash."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.data.sources import ArrayRecordSource, WebDatasetSource
from libai_data.errors import ConfigError, DataPipelineError, FormatError
from tests.data.sources.published_files import tar_of
from tests.data.sources.record_files import ENDINGS, SOURCES, WRITERS, put, same, texts, write
from tests.deadline import stretched

KINDS = sorted(SOURCES)
pytest.importorskip("array_record")
if find_spec("webdataset") is None:  # Its import takes a second.
    pytest.skip("not installed: webdataset", allow_module_level=True)


def read_each(kind: str, path: Path) -> list[Any]:
    """What can be read of a file: records, and the errors of those that cannot."""
    try:
        source = SOURCES[kind](path)
    except DataPipelineError as error:
        return [error]
    found: list[Any] = []
    for index in range(len(source)):
        try:
            found.append(source[index])
        except DataPipelineError as error:
            found.append(error)
    return found


def wrong(found: list[Any], expected: list[Any]) -> list[Any]:
    """Records that are neither right nor an error."""
    return [
        record
        for record, right in zip(found, expected)
        if not isinstance(record, DataPipelineError) and not same(record, right)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_file_cut_short_anywhere_no_wrong_record_is_read(tmp_path: Path, kind: str) -> None:
    whole, cut = tmp_path / f"whole.{ENDINGS[kind]}", tmp_path / f"whole_cut.{ENDINGS[kind]}"
    expected = write(kind, whole, texts(8))
    content = whole.read_bytes()
    errors = 0
    for length in sorted({*np.linspace(0, len(content) - 1, 60).astype(int).tolist(), len(content) - 1}):
        put(cut, content[:length])
        found = read_each(kind, cut)
        assert not wrong(found, expected)
        told = [str(error) for error in found if isinstance(error, DataPipelineError)]
        assert all(cut.name in each for each in told)
        errors += bool(told) or len(found) < len(expected)
    assert errors >= (55 if kind != "webdataset" else 30)  # What is cut from a tar file may be padding behind its end.


def damaged(content: bytes, random: np.random.Generator, start: int, stop: int) -> bytes:
    """A copy with a bit or some bytes changed between two places."""
    copy = bytearray(content)
    place = int(random.integers(start, stop))
    if random.random() < 0.5:
        copy[place] ^= 1 << int(random.integers(0, 8))
    else:
        copy[place : min(place + 8, stop)] = random.bytes(min(place + 8, stop) - place)
    return bytes(copy)


def test_damage_of_array_records_is_always_noticed(tmp_path: Path) -> None:
    path, random = tmp_path / "a", np.random.default_rng(3)
    expected = WRITERS["array_record"](path, texts(40), "group_size:3")
    content = path.read_bytes()
    # Behind the records follow the footer, padding up to the last block, and the postscript, also padded.
    used = len(content.rstrip(b"\0"))
    ends = [(0, 40000), (0, 200), (len(content) - 65536, len(content) - 65536 + 200)]
    noticed = 0
    for number in range(150):
        start, stop = ends[number % 3]
        put(path, damaged(content, random, start, min(stop, used)))
        found = read_each("array_record", path)
        assert not wrong(found, expected)
        noticed += any(isinstance(record, FormatError) for record in found)
    assert noticed > 40  # Block headers and padding may be damaged without harm.


def test_damaged_pages_of_parquet_are_noticed_by_their_checksums(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, random = tmp_path / "a.parquet", np.random.default_rng(5)
    rows = [{"text": text} for text in texts(50)]
    parquet.write_table(
        pyarrow.Table.from_pylist(rows), str(path), write_page_checksum=True, compression="none", use_dictionary=False
    )
    content = path.read_bytes()
    start = content.index(rows[3]["text"].encode())
    for _ in range(50):
        changed = damaged(content, random, start, start + 1000)
        if changed != content:
            put(path, changed)
            (error,) = {str(each) for each in read_each("parquet", path)}
            assert "a.parquet, record 0, offset 4: row group 0 cannot be read" in error


@pytest.mark.parametrize("kind", ["parquet", "webdataset", "jsonl", "numpy", "array_record"])
def test_a_pointer_of_git_lfs_is_refused_with_the_command_that_fetches_the_content(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{ENDINGS[kind]}"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")
    with pytest.raises(FormatError, match=r"a\.\w+: the file is a pointer of Git LFS, .*run `git lfs pull`"):
        SOURCES[kind](path)


def test_without_the_package_array_records_are_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(ConfigError, match=r"ArrayRecordSource needs.*pip install 'libai_data\[records\]'"):
        ArrayRecordSource(tmp_path / "a")


def test_array_records_are_read_by_a_process_forked_while_they_are_in_use(tmp_path: Path) -> None:
    expected = write("array_record", tmp_path / "a", texts(300))
    source = ArrayRecordSource(tmp_path / "a")
    assert source.read_many(range(300)) == expected
    child = multiprocessing.get_context("fork").Process(target=_read_or_exit, args=(source, expected))
    child.start()
    child.join(stretched(60))
    assert child.exitcode == 0
    assert source[299] == expected[299]


def _read_or_exit(source: ArrayRecordSource, expected: list[bytes]) -> None:
    os._exit(0 if source.read_many(range(len(expected))) == expected else 1)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a.txt", "b.txt", "a.cls"], r"x.tar at offset 2560, 'a.cls': the key 'a' occurred before"),
        (["a.txt", "a.TXT"], r"x.tar at offset 1536, 'a.TXT': a second field 'txt'"),
        (["a.txt", "a.__KEY__"], r"x.tar at offset 1536, 'a.__KEY__': a second field '__key__'"),
    ],
)
def test_samples_that_occur_twice_are_refused(tmp_path: Path, names: list[str], told: str) -> None:
    (tmp_path / "x.tar").write_bytes(tar_of({name: name.encode() for name in names}))
    with pytest.raises(FormatError, match=told):
        WebDatasetSource(tmp_path / "x.tar")


def test_what_is_no_field_is_passed_over_as_webdataset_does(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    names = ["a.txt", "README", ".hidden", "folder/a.seg.png", "__meta__", "__meta__/c.txt", "folder/b.txt"]
    path = tmp_path / "x.tar"
    path.write_bytes(tar_of({name: name.encode() for name in names}))
    with tarfile.open(path, "a") as file:
        link = tarfile.TarInfo("folder/link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link)
    theirs = [
        {name: value for name, value in sample.items() if name not in ("__url__", "__local_path__")}
        for sample in webdataset.WebDataset(str(path), shardshuffle=False)
    ]
    assert list(WebDatasetSource(path)) == theirs
    assert [sample["__key__"] for sample in theirs] == ["a", "folder/a", "folder/b"]
