"""`.bin/.idx` files: what is written is read, byte by byte as the format says, and what is broken is refused."""

from __future__ import annotations

import pickle
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.sources import IndexedSource, IndexedWriter, dtype_for, merge_indexed
from libai_data.data.sources.indexed_format import DTYPES, parse_index
from libai_data.errors import ConfigError, FormatError
from tests.properties import in_one_folder

Documents = list[list[list[int]]]
FEW = in_one_folder(40)


def documents(low: int = 0, high: int = 127) -> st.SearchStrategy[Documents]:
    return st.lists(st.lists(st.lists(st.integers(low, high), max_size=6), max_size=4), max_size=6)


def write(prefix: Path, content: Documents, dtype: Any = np.uint16) -> IndexedSource:
    with IndexedWriter(prefix, dtype) as writer:
        for document in content:
            writer.add_document(document)
    return IndexedSource(prefix)


def read(source: IndexedSource) -> Documents:
    return [
        [source[number].tolist() for number in range(start, stop)]
        for start, stop in zip(source.doc_idx[:-1], source.doc_idx[1:])
    ]


def idx_bytes(content: Documents, code: int, itemsize: int) -> bytes:
    """The `.idx` file as the format's description has it, written field by field."""
    sizes = [len(sequence) for document in content for sequence in document]
    ends = np.cumsum([0, *(len(document) for document in content)]).tolist()
    pointers = [itemsize * sum(sizes[:number]) for number in range(len(sizes))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(ends))
    return head + b"".join(
        struct.pack(f"<{len(values)}{kind}", *values) for kind, values in (("i", sizes), ("q", pointers), ("q", ends))
    )


@FEW
@given(content=documents(), code=st.sampled_from(sorted(DTYPES)))
def test_what_is_written_is_read_and_is_the_format_byte_by_byte(tmp_path: Path, content: Documents, code: int) -> None:
    source = write(tmp_path / "a", content, DTYPES[code])
    assert read(source) == content
    assert source.dtype == DTYPES[code]
    for number, document in enumerate(content):
        assert source.document(number).tolist() == [token for sequence in document for token in sequence]
    assert (tmp_path / "a.idx").read_bytes() == idx_bytes(content, code, source.dtype.itemsize)
    flat = [token for document in content for sequence in document for token in sequence]
    assert (tmp_path / "a.bin").read_bytes() == np.array(flat, DTYPES[code]).tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@FEW
@given(shards=st.lists(documents(), min_size=1, max_size=4))
def test_merged_shards_are_what_one_writer_would_have_written(tmp_path: Path, shards: list[Documents]) -> None:
    for number, shard in enumerate(shards):
        write(tmp_path / str(number), shard)
    merge_indexed([tmp_path / str(number) for number in range(len(shards))], tmp_path / "merged")
    write(tmp_path / "whole", [document for shard in shards for document in shard])
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"merged{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_the_extremes_of_each_dtype_survive_and_the_next_numbers_are_refused(tmp_path: Path, dtype: Any) -> None:
    limits = np.iinfo(dtype)
    source = write(tmp_path / "a", [[[limits.min, limits.max]]], dtype)
    assert source[0].tolist() == [limits.min, limits.max]
    with IndexedWriter(tmp_path / "b", dtype) as writer:
        for wrong in (limits.min - 1, limits.max + 1):
            with pytest.raises((ValueError, OverflowError)):
                writer.add_sequence([0, wrong])


def test_reading_copies_nothing_and_a_pickle_holds_no_tokens(tmp_path: Path) -> None:
    source = write(tmp_path / "a", [[list(range(500)), list(range(500))]] * 20)
    assert np.shares_memory(source[3], source.tokens)
    assert np.shares_memory(source.document(1), source.tokens)
    assert not source[3].flags.writeable
    packed = pickle.dumps(source)
    assert len(packed) < 1000
    assert read(pickle.loads(packed)) == read(source)


def test_numbers_outside_are_refused_and_negative_ones_count_from_the_end(tmp_path: Path) -> None:
    source = write(tmp_path / "a", [[[1, 2, 3], [4, 5]]])
    assert source[-1].tolist() == [4, 5]
    for number in (2, -3):
        with pytest.raises(IndexError, match="2 sequences"):
            source[number]
    with pytest.raises(IndexError, match="1 documents"):
        source.document(1)


def test_a_billion_tokens_open_in_milliseconds(tmp_path: Path) -> None:
    count, each = 100_000, 10_000
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    arrays = np.full(count, each, "<i4"), np.arange(count, dtype="<i8") * 2 * each, np.arange(count + 1, dtype="<i8")
    (tmp_path / "a.idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(2 * count * each)  # a sparse file, which takes no room
    taken = []
    for _ in range(5):
        start = time.process_time()
        source = IndexedSource(tmp_path / "a")
        taken.append(time.process_time() - start)
    assert len(source.tokens) == 10**9
    assert min(taken) < 0.05


def test_a_block_left_by_an_exception_leaves_the_old_files_and_no_others(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1]]])
    with pytest.raises(KeyError), IndexedWriter(tmp_path / "a") as writer:
        writer.add_sequence([2])
        raise KeyError
    assert read(IndexedSource(tmp_path / "a")) == [[[1]]]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("dtype", "tokens", "message"),
    [
        *((np.uint16, tokens, "vector of integers") for tokens in ([1.5], [[1]], ["a"], 3)),
        (np.uint16, [2], r"last 1 sequences .* end_document"),
        *((dtype, [2], "uint16") for dtype in (np.float32, np.uint32, np.uint64)),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_no_file(
    tmp_path: Path, dtype: Any, tokens: Any, message: str
) -> None:
    with pytest.raises((ValueError, ConfigError), match=message), IndexedWriter(tmp_path / "a", dtype) as writer:
        writer.add_sequence(tokens)
    assert not list(tmp_path.iterdir())


def test_a_document_that_is_refused_leaves_nothing_in_the_next_one(tmp_path: Path) -> None:
    def failing() -> Iterator[list[int]]:
        yield [7]
        raise OSError("the reader of the sentences failed")

    refused: list[Any] = [[[3], [70_000]], [[4], [1.5]], failing()]
    with IndexedWriter(tmp_path / "x") as writer:
        writer.add_document([[1], [2]])
        for document in refused:
            with pytest.raises((ValueError, OSError)):
                writer.add_document(document)
        writer.add_document([[5]])
    source = IndexedSource(tmp_path / "x")
    assert [source.document(number).tolist() for number in range(source.num_documents)] == [[1, 2], [5]]


def test_two_writers_of_one_prefix_do_not_write_into_each_others_files(tmp_path: Path) -> None:
    first, second = IndexedWriter(tmp_path / "a"), IndexedWriter(tmp_path / "a")
    first.add_document([[1, 2, 3]])
    second.add_document([[7, 8]])
    first.close()
    assert read(IndexedSource(tmp_path / "a")) == [[[1, 2, 3]]]
    second.close()
    assert read(IndexedSource(tmp_path / "a")) == [[[7, 8]]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_shards_of_another_dtype_are_not_merged(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1]]], np.uint16)
    write(tmp_path / "b", [[[1]]], np.int32)
    with pytest.raises(ConfigError, match=r"b has int32 tokens, .*c has uint16"):
        merge_indexed([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    with pytest.raises(ConfigError, match="nothing to merge"):
        merge_indexed([], tmp_path / "c")
    before = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is one of the prefixes, and would be overwritten"):
        merge_indexed([tmp_path / "a", tmp_path / "a"], tmp_path / "link" / "a")
    assert (tmp_path / "a.bin").read_bytes() == before
    assert not list(tmp_path.glob("c*"))


def test_the_dtype_of_a_vocabulary_is_libais() -> None:
    assert [dtype_for(size).name for size in (10, 65499, 65500)] == ["uint16", "uint16", "int32"]


def test_a_missing_file_is_named_with_the_nearest_and_the_ending(tmp_path: Path) -> None:
    write(tmp_path / "wikipedia", [[[1]]])
    with pytest.raises(ConfigError, match="Did you mean 'wikipedia'"):
        IndexedSource(tmp_path / "wikipdia")
    with pytest.raises(ConfigError, match="without the ending"):
        IndexedSource(tmp_path / "wikipedia.idx")


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (0, b"TNTIDX\x00\x00", r"begins with b'TNTIDX.* at offset 0"),
        (9, struct.pack("<Q", 2), "version 2 at offset 9"),
        (17, b"\x06", "dtype code 6 at offset 17; which stands for floats"),
        (17, b"\x63", "dtype code 99 at offset 17; known are"),
        (18, struct.pack("<Q", 4), r"has 94 bytes, but .*4 sequences at offset 18.* it has 106"),
        (26, struct.pack("<Q", 2**63), "it has 73786976294838206534"),
        (34, struct.pack("<i", -1), r"offsets \[34, 46\] that sequence 0 of 3 has -1 uint16 tokens"),
        (42, struct.pack("<i", 9), r"offsets \[42, 62\] that sequence 2 .* at byte 6, and the .bin file has 14 bytes"),
        (42, struct.pack("<i", 3), "14 bytes, but according to .* its 3 sequences have 12"),
        (46, struct.pack("<q", 8), r"sequence 0 .* begins at byte 8 of the .bin file; .* end at byte 0"),
        (70, struct.pack("<q", 1), r"entry 0 at offset 70 is wrong, .*: \[1\]"),
        (78, struct.pack("<q", -5), r"entry 1 at offset 78 is wrong, .*: \[0, -5\]"),
        (
            86,
            struct.pack("<q", 2),
            r"at the end the number of sequences, 3; entry 2 at offset 86 is wrong, .*: \[2, 2\]",
        ),
    ],
)
def test_each_field_that_contradicts_is_refused_with_offset_and_numbers(
    tmp_path: Path, offset: int, new: bytes, message: str
) -> None:
    write(tmp_path / "a", [[[1, 2], [3]], [[4, 5, 6, 7]]])
    path = tmp_path / "a.idx"
    content = bytearray(path.read_bytes())
    assert len(content) == 34 + 12 * 3 + 8 * 3
    content[offset : offset + len(new)] = new
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message):
        IndexedSource(tmp_path / "a")


INPUTS = 4_000
Said = tuple[int, list[int], list[int], list[int]]


def whole(random: np.random.Generator) -> tuple[bytes, int]:
    """A good index of up to 8 sequences, and the size of its `.bin` file."""
    code = int(random.choice(list(DTYPES)))
    itemsize = np.dtype(DTYPES[code]).itemsize
    sizes = random.integers(0, 5, random.integers(0, 9)).tolist()
    cuts = np.sort(random.integers(0, len(sizes) + 1, random.integers(0, 4))).tolist()
    content = [[[0] * size for size in sizes[first:last]] for first, last in zip([0, *cuts], [*cuts, len(sizes)])]
    return idx_bytes(content, code, itemsize), itemsize * sum(sizes)


def corrupt(content: bytes, bin_bytes: int, random: np.random.Generator) -> tuple[bytes, int]:
    """Damage a file in one of the ways that occur: fields, bits, ends, holes, foreign bytes, another `.bin`."""
    damaged, kind = bytearray(content), int(random.integers(0, 8))
    if kind == 0:
        return bytes(damaged[: random.integers(0, len(damaged))]), bin_bytes
    if kind == 1:
        return bytes(damaged) + random.bytes(int(random.integers(1, 40))), bin_bytes
    if kind == 2:
        return bytes(damaged), bin_bytes + int(random.integers(-bin_bytes, 20))
    if kind == 3:
        return random.bytes(len(damaged)), bin_bytes
    if kind == 4:
        offset, size = ((0, 9), (9, 8), (17, 1), (18, 8), (26, 8))[int(random.integers(0, 5))]
        few = int(random.integers(0, 20)).to_bytes(size, "little")
        damaged[offset : offset + size] = few if random.random() < 0.5 else random.bytes(size)
    elif kind == 5:
        for place in random.integers(0, len(damaged), random.integers(1, 4)):
            damaged[place] ^= 1 << int(random.integers(0, 8))
    elif kind == 6:
        for place in random.integers(34, len(damaged), random.integers(1, 4)) if len(damaged) > 34 else ():
            damaged[place] = int(random.integers(0, 256))
    else:
        first, second = (int(place) for place in np.sort(random.integers(0, len(damaged) + 1, 2)))
        damaged[first:second] = bytes(second - first)
    return bytes(damaged), bin_bytes


def by_the_description(content: bytes, bin_bytes: int) -> Said | None:
    """What a file says, read number by number; None if it says nothing that holds."""
    if len(content) < 34 or content[:9] != b"MMIDIDX\x00\x00":
        return None
    version, code, count, entries = struct.unpack("<QBQQ", content[9:34])
    if version != 1 or code not in DTYPES or len(content) != 34 + 12 * count + 8 * entries or not entries:
        return None
    sizes = list(struct.unpack_from(f"<{count}i", content, 34))
    pointers = list(struct.unpack_from(f"<{count}q", content, 34 + 4 * count))
    ends = list(struct.unpack_from(f"<{entries}q", content, 34 + 12 * count))
    at = 0
    for size, pointer in zip(sizes, pointers):
        if size < 0 or pointer != at:
            return None
        at += size * np.dtype(DTYPES[code]).itemsize
    if at != bin_bytes or ends[0] != 0 or ends[-1] != count or ends != sorted(ends):
        return None
    return code, sizes, pointers, ends


def test_of_four_thousand_corrupted_indices_each_is_refused_or_read_as_it_says() -> None:
    random = np.random.default_rng(7)
    refused = 0
    for _ in range(INPUTS):
        content, bin_bytes = corrupt(*whole(random), random)
        expected = by_the_description(content, bin_bytes)
        try:
            index = parse_index(np.frombuffer(content, np.uint8), bin_bytes, "fuzz.idx")
        except FormatError as error:
            assert expected is None, (content, error)
            refused += 1
            continue
        found = (index.sizes.tolist(), index.pointers.tolist(), index.documents.tolist())
        assert expected is not None and (DTYPES[expected[0]] == index.dtype, *found) == (True, *expected[1:]), content
    # Some kinds of damage leave a file that holds; most do not.
    assert INPUTS * 0.7 < refused < INPUTS


@pytest.mark.parametrize("proportions", [[], [0, 0], [1.5, -0.5], [1, float("nan")], ["1"]])
def test_proportions_that_are_none_are_refused(tmp_path: Path, proportions: Any) -> None:
    with IndexedWriter(tmp_path / "a") as writer:
        writer.add_document([[1, 2]])
    with pytest.raises(ConfigError, match="proportions are"):
        IndexedSource(tmp_path / "a").split(proportions)
