"""Parts: whatever their size, they hold the same documents."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tempfile
from pathlib import Path
from typing import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.errors import ConfigError
from libai_data.data.text.documents import BadLine, Document, read_piece
from libai_data.data.text.files import find_inputs
from libai_data.data.text.parts import DOCUMENTS, Cutting, cut_into_parts
from tests.properties import examples

LINES = st.lists(st.sampled_from(["", " ", "\r", "word", "two words\r", "ü" * 9, " 中文 "]), max_size=30)


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
            for record in read_piece(piece, ["text"], cutting.documents):
                if isinstance(record, Document):
                    found.append(record.texts)
                else:
                    bad.append(record.reason)
    return found, bad


def paragraphs(text: str) -> list[str]:
    """An independent reading of paragraphs."""
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return ["\n".join(lines).rstrip("\r") for lines in found if lines]


@settings(max_examples=examples(60))
@given(LINES, st.booleans(), st.integers(1, 40), st.sampled_from(DOCUMENTS), st.sampled_from(["", ".gz", ".bz2"]))
def test_documents_do_not_depend_on_the_size_of_the_parts(
    lines: list[str], ends: bool, part_bytes: int, documents: str, suffix: str
) -> None:
    text = "\n".join(lines) + ("\n" if ends else "")
    expected = {
        "line": [line.rstrip("\r") for line in text.split("\n") if line.strip()],
        "paragraph": paragraphs(text),
        "file": [text] if text.strip() else [],
    }[documents]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"corpus.txt{suffix}"
        path.write_bytes(COMPRESS[suffix](text.encode()))
        found, bad = read_all([path], Cutting(documents, part_bytes=part_bytes))
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
    lines = [json.dumps({"text": str(random.integers(0, 10**9, 20).tolist())}) for _ in range(count)]
    path = tmp_path / f"corpus.jsonl{suffix}"
    data = COMPRESS[suffix]("\n".join(lines).encode())
    path.write_bytes(data[: len(data) // 2])
    found, bad = read_all([path], Cutting(part_bytes=20_000))
    assert 0 < len(found) < count
    assert [{"text": text} for (text,) in found] == [json.loads(line) for line in lines[: len(found)]]
    assert len(bad) == 1
    assert "cannot be decompressed further" in bad[0]


def test_lines_that_are_no_documents_are_told_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    bad = [b"{", b"[1]", b"{}", b'{"text": null}', b"\xff", b'{"text": "\\ud800"}']
    path.write_bytes(b'{"text": "one"}\n' + b"\n\n".join(bad) + b'\n{"text": "two"}')
    (part,) = cut_into_parts([path], Cutting())
    records = list(read_piece(part.pieces[0], ["text"], "line"))
    assert [record.line for record in records] == [1, 2, 4, 6, 8, 10, 12, 13]
    assert [record.texts for record in records if isinstance(record, Document)] == [("one",), ("two",)]
    reasons = [record.reason for record in records if isinstance(record, BadLine)]
    for words, reason in zip(["no JSON", "list", "no 'text'", "NoneType", "UTF-8", "surrogates"], reasons):
        assert words in reason


def test_inputs_are_files_globs_and_folders_each_file_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a/2.txt", "a/1.txt", "a/.hidden/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_inputs([f"{tmp_path}/b.txt", f"{tmp_path}/a", f"{tmp_path}/**/1.txt"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["b.txt", "a/1.txt", "a/2.txt"]
    with pytest.raises(ConfigError, match="no file is named by"):
        find_inputs([f"{tmp_path}/*.parquet"])
