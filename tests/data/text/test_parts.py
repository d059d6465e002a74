"""Parts: whatever their size, they hold the same documents."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tempfile
from pathlib import Path
from typing import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.data.text import parts
from libai_data.data.text.documents import BadLine, Document, read_piece
from libai_data.data.text.files import COMPRESSED, find_inputs
from libai_data.data.text.parts import Cutting, cut_into_parts
from libai_data.errors import ConfigError
from tests.data.text.scripts import SCRIPTS, sentences
from tests.properties import examples

LINES = st.lists(
    st.tuples(
        st.sampled_from(["", " ", "word", "two words", "ü" * 9, " 中文 "]), st.sampled_from(["\n", "\r\n", "\r"])
    ),
    max_size=30,
)


def zstandard_compress(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return bytes(zstandard.ZstdCompressor().compress(data))


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard_compress,
}


def read_all(paths: list[Path], cutting: Cutting) -> tuple[list[tuple[str, ...]], list[str]]:
    """Texts and reasons, in order."""
    found, bad = [], []
    for part in cut_into_parts(paths, cutting):
        for piece in part.pieces:
            for record in read_piece(piece, ["text"]):
                if isinstance(record, Document):
                    found.append(record.texts)
                else:
                    bad.append(record.reason)
    return found, bad


@settings(max_examples=examples(60))
@given(LINES, st.booleans(), st.integers(1, 40), st.sampled_from(["", ".gz", ".bz2"]))
def test_documents_do_not_depend_on_the_size_of_the_parts(
    lines: list[tuple[str, str]], ends: bool, part_bytes: int, suffix: str
) -> None:
    text = "".join(map("".join, lines))
    text = text if ends else text.rstrip("\r\n")
    expected = [line.rstrip("\n") for line in io.StringIO(text, newline=None) if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"corpus.txt{suffix}"
        path.write_bytes(COMPRESS[suffix](text.encode()))
        found, bad = read_all([path], Cutting(part_bytes=part_bytes))
    assert ([text for (text,) in found], bad) == (expected, [])


@pytest.mark.parametrize("suffix", COMPRESS)
def test_each_compression_gives_the_same_documents(tmp_path: Path, suffix: str) -> None:
    lines = [json.dumps({"text": f"document {number} " * 50}) for number in range(200)]
    path = tmp_path / f"corpus.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix]("\n".join(lines).encode()))
    found, bad = read_all([path], Cutting(part_bytes=4000))
    assert found == [(f"document {number} " * 50,) for number in range(200)]
    assert not bad


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_compressed_file_that_is_cut_off_gives_its_whole_lines_and_is_told_of(tmp_path: Path, suffix: str) -> None:
    random = np.random.default_rng(0)
    # bzip2 gives nothing of a block of 900,000 bytes that is not whole.
    count = 20000 if suffix == ".bz2" else 4000
    lines = [json.dumps({"text": str(numbers)}) for numbers in random.integers(0, 10**9, (count, 20)).tolist()]
    path = tmp_path / f"corpus.jsonl{suffix}"
    data = COMPRESS[suffix]("\n".join(lines).encode())
    path.write_bytes(data[: len(data) // 2])
    found, bad = read_all([path], Cutting(part_bytes=20_000))
    assert 0 < len(found) < count
    assert [{"text": text} for (text,) in found] == [json.loads(line) for line in lines[: len(found)]]
    assert len(bad) == 1
    assert "cannot be decompressed further" in bad[0]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize(("between", "whole"), [(b"", True), (bytes(8), True), (b"no frame at all", False)])
def test_what_follows_a_compressed_frame_is_read_or_told_of(
    tmp_path: Path, suffix: str, between: bytes, whole: bool
) -> None:
    if suffix == ".zst":
        pytest.importorskip("zstandard")
    path = tmp_path / f"corpus.jsonl{suffix}"
    frames = [COMPRESS[suffix](json.dumps({"text": text}).encode() + b"\n") for text in "ab"]
    path.write_bytes(between.join(frames) + between)
    found, bad = read_all([path], Cutting())
    assert found == ([("a",), ("b",)] if whole else [("a",)])
    assert len(bad) == (not whole) and all("cannot be decompressed further" in reason for reason in bad)


def test_a_key_that_several_columns_have_is_told_of(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["text", "text"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    found, bad = read_all([tmp_path / "a.parquet"], Cutting())
    assert not found and len(bad) == 1 and "several columns are called 'text'" in bad[0]


def test_lines_that_are_no_documents_are_told_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    bad = [b"{", b"[1]", b"{}", b'{"text": null}', b"\xff", b'{"text": "\\ud800"}']
    path.write_bytes(b'{"text": "one"}\n' + b"\n\n".join(bad) + b'\n{"text": "two"}')
    (part,) = cut_into_parts([path], Cutting())
    records = list(read_piece(part.pieces[0], ["text"]))
    assert [record.line for record in records] == [1, 2, 4, 6, 8, 10, 12, 13]
    assert [record.texts for record in records if isinstance(record, Document)] == [("one",), ("two",)]
    reasons = [record.reason for record in records if isinstance(record, BadLine)]
    for words, reason in zip(
        ["not JSON", "one object per line", "no 'text'", "NoneType", "UTF-8", "surrogates"], reasons
    ):
        assert words in reason


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.txt", "x.txt.gz"])
def test_utf_16_is_recognised_with_its_mark_and_without(tmp_path: Path, encoding: str, name: str) -> None:
    path = tmp_path / name
    data = "\n".join('{"text": "a line of words"}' for _ in range(500)).encode(encoding)
    path.write_bytes(COMPRESS[path.suffix](data) if path.suffix == ".gz" else data)
    found, bad = read_all([path], Cutting(part_bytes=1000))
    assert not found
    assert len(bad) == 1 and f"iconv -f {encoding[:6].upper()} -t" in bad[0]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("script", [script for script, (_, space, _) in SCRIPTS.items() if space])
def test_utf_16_without_a_mark_is_recognised_in_every_script_with_spaces(
    tmp_path: Path, encoding: str, script: str
) -> None:
    # Few spaces: as words are longer than those of `sentences`.
    lines = [line.replace(" ", "", line.count(" ") * 2 // 3) for line in sentences(script, 20)]
    (tmp_path / "x.txt").write_bytes(("\n".join(lines) + "\n").encode(encoding))
    found, bad = read_all([tmp_path / "x.txt"], Cutting())
    assert not found
    assert len(bad) == 1 and "UTF-16" in bad[0]


def test_a_few_zeros_and_short_lines_are_utf_8(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("\0\n" + "a\n" * 3000 + "bc\0\n")
    found, bad = read_all([tmp_path / "x.txt"], Cutting())
    assert (len(found), bad) == (3002, [])


def test_byte_order_marks_of_files_that_were_joined_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("\ufeffone\n\n\ufefftwo\n\nthree\n", "utf-8")
    assert read_all([tmp_path / "x.txt"], Cutting()) == ([("one",), ("two",), ("three",)], [])
    (tmp_path / "x.jsonl").write_text('\ufeff{"text": "one"}\n\ufeff{"text": "two"}\n', "utf-8")
    assert read_all([tmp_path / "x.jsonl"], Cutting()) == ([("one",), ("two",)], [])
    # As an editor writes an empty file.
    (tmp_path / "empty.jsonl").write_text("\ufeff\n\ufeff", "utf-8")
    assert read_all([tmp_path / "empty.jsonl"], Cutting()) == ([], [])
    # A mark between CR and LF is a line.
    (tmp_path / "mixed.txt").write_bytes(b"\r\xef\xbb\xbf\n\xff")
    (part,) = cut_into_parts([tmp_path / "mixed.txt"], Cutting())
    assert [record.line for record in read_piece(part.pieces[0], ["text"])] == [3]


def test_inputs_are_files_globs_and_folders_each_file_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a/2.txt", "a/1.txt", "a/.hidden/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_inputs([f"{tmp_path}/b.txt", f"{tmp_path}/a", f"{tmp_path}/**/1.txt"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["b.txt", "a/1.txt", "a/2.txt"]
    with pytest.raises(ConfigError, match="no file is named by"):
        find_inputs([f"{tmp_path}/*.parquet"])
    with pytest.raises(ConfigError, match="no files are given"):
        find_inputs([])


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_folders_give_files_of_known_suffixes_and_what_is_left_out_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("LICENSE", "README.md", "a.jsonl", "b.txt.gz", "c.parquet", "d.json.zst", "e.TXT", "f.npy"):
        (tmp_path / name).write_text("x")
    assert names(find_inputs([str(tmp_path)])) == ["a.jsonl", "b.txt.gz", "c.parquet", "d.json.zst", "e.TXT"]
    assert "3 of 8 files" in caplog.text and "LICENSE" in caplog.text
    assert names(find_inputs([f"{tmp_path}/*.md"])) == ["README.md"]
    assert len(find_inputs([str(tmp_path)], form="text")) == 8
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "wiki_00").write_text("x")
    with pytest.raises(ConfigError, match=r"such as .*wiki_00"):
        find_inputs([f"{tmp_path}/only"])


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz", "A.XLSX", "b.tar"])
def test_tables_and_archives_are_refused_unless_the_format_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    for pattern in (str(tmp_path / name), f"{tmp_path}/*"):
        with pytest.raises(ConfigError, match=f"the suffix of .*{name} is not that of a text file"):
            find_inputs([pattern])
        assert names(find_inputs([pattern], form="text")) == [name]


@pytest.mark.parametrize("packed", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_file_without_its_suffix_is_recognised(tmp_path: Path, packed: Callable[[bytes], bytes]) -> None:
    (tmp_path / "x.jsonl").write_bytes(packed(b'{"text": "a"}\n' * 9))
    found, bad = read_all([tmp_path / "x.jsonl"], Cutting())
    assert not found
    assert len(bad) == 1 and "the file is compressed; rename it so that its name ends with ." in bad[0]


def test_a_file_that_is_there_compressed_too_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("x")
    (tmp_path / "x.jsonl.gz").write_text("x")
    for patterns in ([str(tmp_path)], [f"{tmp_path}/x.jsonl", f"{tmp_path}/*.gz"]):
        with pytest.raises(ConfigError, match=r"x.jsonl and .*x.jsonl.gz have the same name"):
            find_inputs(patterns)
    assert names(find_inputs([f"{tmp_path}/*.gz"])) == ["x.jsonl.gz"]


def test_what_preprocessing_writes_and_the_tokenizer_are_no_input(tmp_path: Path) -> None:
    own = ["out.parts/lock", "out.parts/plan.json", "out.parts/00000000.json", "out_text_document.bin", "out.bad_lines"]
    own += ["out_text_document.idx", "out_text_document.cache/gpt-1.npy", "tokenizer.json"]
    for name in (*own, "good.jsonl", "mine.parts/text.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    for pattern in (str(tmp_path), f"{tmp_path}/**"):
        found = find_inputs([pattern], form="text", but=[tmp_path / "tokenizer.json"])
        assert names(found) == ["good.jsonl", "text.jsonl"]


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_a_compressed_file_without_a_byte_is_told_of(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"x.jsonl{suffix}").touch()
    found, bad = read_all([tmp_path / f"x.jsonl{suffix}"], Cutting())
    assert not found
    assert len(bad) == 1 and "the file has no bytes" in bad[0]


def test_a_file_that_becomes_shorter_while_it_is_cut_ends_the_search(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"no end of a line")
    with open(tmp_path / "x.txt", "rb") as file:
        assert parts._next_cut(file, 4, 100) == 100
