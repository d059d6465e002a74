"""The index of a tar archive: what other programs wrote is found, what is broken or dangerous is refused."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from libai_data.data.sources.packed_names import PackedNames
from libai_data.data.sources.tar_index import TarIndex, index_tar
from libai_data.errors import FormatError
from tests.data.sources.published_files import tar_of
from tests.properties import in_one_folder

LONG = "folder of a rather long name/" * 9 + "ö" * 60 + ".jpg"
CONTENT = {"a.jpg": b"first", "b/c.cls": b"", "b/ä.jpg": b"x" * 513, LONG: b"long" * 300}
IN_ONE_FILE = in_one_folder(60)


def write_tar(path: Path, files: Mapping[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    path.write_bytes(tar_of(files, form))
    return path


def content(path: Path, index: TarIndex) -> dict[str, bytes]:
    data = path.read_bytes()
    spans = zip(index.names, index.offsets.tolist(), index.sizes.tolist())
    return {name: data[offset : offset + size] for name, offset, size in spans}


@pytest.mark.parametrize("form", ["ustar", "gnu", "pax"])
def test_what_gnu_tar_wrote_of_a_folder_is_found_without_folders_and_links(tmp_path: Path, form: str) -> None:
    for name, data in CONTENT.items():
        if form in ("gnu", "pax", "oldgnu") or name != LONG:
            path = tmp_path / "files" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    (tmp_path / "files" / "link").symlink_to("a.jpg")
    subprocess.run(["tar", f"--format={form}", "-C", tmp_path / "files", "-cf", tmp_path / "x.tar", "."], check=True)
    expected = {name: data for name, data in CONTENT.items() if (tmp_path / "files" / name).exists()}
    assert content(tmp_path / "x.tar", index_tar(tmp_path / "x.tar")) == expected


def test_an_archive_within_a_file_is_found(tmp_path: Path) -> None:
    inner = write_tar(tmp_path / "inner.tar", CONTENT)
    outer = write_tar(tmp_path / "outer.tar", {"one.txt": b"1", "inner.tar": inner.read_bytes(), "two.txt": b"2"})
    whole = index_tar(outer)
    start, size = int(whole.offsets[1]), int(whole.sizes[1])
    assert content(outer, index_tar(outer, start, start + size)) == CONTENT


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "..", "./../x", "a/.."])
def test_names_that_lead_out_are_refused_with_their_offset(tmp_path: Path, name: str) -> None:
    path = write_tar(tmp_path / "x.tar", {"good": b"1", name: b"2"})
    with pytest.raises(FormatError, match=r"x\.tar at offset 1024: a file called .* leads out of the archive"):
        index_tar(path)


def test_an_archive_cut_anywhere_is_refused_with_the_offset(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", CONTENT)
    data = path.read_bytes()
    index = index_tar(path)
    last = int(index.offsets[-1] + index.sizes[-1])
    for cut in (0, 1, 511, 512, 514, 700, 1024, 1500, 2048, last - 1, last):
        path.write_bytes(data[:cut])
        with pytest.raises(
            FormatError, match=r"^\S+x\.tar at offset [0-9]+: the archive is cut short, or damaged: [^/]*$"
        ):
            index_tar(path)


@IN_ONE_FILE
@given(place=st.integers(0, 5000), value=st.integers(0, 255))
@example(place=3845, value=0)  # cuts a long name at a slash
def test_a_changed_byte_is_found_or_changes_content_alone(tmp_path: Path, place: int, value: int) -> None:
    path = write_tar(tmp_path / "x.tar", CONTENT, tarfile.GNU_FORMAT)
    before = index_tar(path)
    data = bytearray(path.read_bytes())
    data[place % len(data)] = value
    path.write_bytes(data)
    try:
        after = index_tar(path)
    except FormatError as error:
        assert "at offset" in str(error)
    else:
        assert after.offsets.tolist() == before.offsets.tolist() and after.sizes.tolist() == before.sizes.tolist()


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_compressed_archives_and_foreign_files_are_refused_as_what_they_are(tmp_path: Path, kind: str) -> None:
    mode: Any = f"w:{kind}"
    with tarfile.open(tmp_path / "x.tar", mode) as tar:
        tar.addfile(tarfile.TarInfo("a"))
    with pytest.raises(FormatError, match=r"at offset 0: it is compressed by (gzip|bzip2|xz)"):
        index_tar(tmp_path / "x.tar")
    (tmp_path / "x.tar").write_bytes(b"\x89PNG\r\n" + b"no archive" * 200)
    with pytest.raises(FormatError, match=r"x\.tar at offset 0: no header of a tar archive"):
        index_tar(tmp_path / "x.tar")


@given(st.lists(st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)))
def test_packed_names_are_those_that_were_packed(names: list[str]) -> None:
    packed = PackedNames.of(names)
    assert list(packed) == names
    assert list(PackedNames.from_numbers(*packed.numbers())) == names
    if names:
        assert packed[-1] == names[-1]
    for outside in (len(names), -len(names) - 1):
        with pytest.raises(IndexError):
            packed[outside]


@pytest.mark.parametrize("first", [CONTENT, {}])
def test_archives_that_were_joined_by_cat_are_refused_with_the_offset(tmp_path: Path, first: Any) -> None:
    path = write_tar(tmp_path / "x.tar", first)
    end = path.stat().st_size
    path.write_bytes(path.read_bytes() + write_tar(tmp_path / "y.tar", {"second.jpg": b"2"}).read_bytes())
    with pytest.raises(FormatError, match=rf"x\.tar at offset {end}: more data follows the end of the archive"):
        index_tar(path)
    subprocess.run(["tar", "-Af", write_tar(tmp_path / "x.tar", first), tmp_path / "y.tar"], check=True)
    assert content(path, index_tar(path)) == {**first, "second.jpg": b"2"}


def test_a_hard_link_is_refused_with_the_option_that_writes_its_content(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.jpg").write_bytes(b"1")
    os.link(tmp_path / "files" / "a.jpg", tmp_path / "files" / "b.jpg")
    command = ["tar", "--sort=name", "-C", str(tmp_path / "files"), "-cf", str(tmp_path / "x.tar"), "."]
    subprocess.run(command, check=True)
    with pytest.raises(FormatError, match=r"x\.tar at offset \d+: .*b\.jpg' is a hard link to .*--hard-dereference"):
        index_tar(tmp_path / "x.tar")
    subprocess.run([*command, "--hard-dereference"], check=True)
    assert content(tmp_path / "x.tar", index_tar(tmp_path / "x.tar")) == {"a.jpg": b"1", "b.jpg": b"1"}


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_a_sparse_file_is_refused_with_the_option_that_wrote_it(tmp_path: Path, form: str) -> None:
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(1 << 20)
    command = ["tar", "-C", str(tmp_path), "--sparse", f"--format={form}", "-cf", str(tmp_path / "x.tar"), "a.bin"]
    subprocess.run(command, check=True)
    with pytest.raises(
        FormatError, match=r"^\S+x\.tar at offset \d+: a sparse file; write the archive without --sparse"
    ):
        index_tar(tmp_path / "x.tar")
