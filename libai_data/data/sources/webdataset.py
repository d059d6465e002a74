"""Reads samples of WebDataset's tar shards by index, instead of from front to back.

Format: github.com/webdataset/webdataset. Neighbouring files whose paths are equal up to the first dot of the name are
the fields of one sample. The rest of the name, after the dot, is the name of the field.
"""

from __future__ import annotations

import re
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any
from zlib import crc32

import numpy as np

from libai_data.atomic_files import PathLike
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.packed_names import PackedNames
from libai_data.data.sources.record_index import STALE_INDEX, record_index
from libai_data.data.sources.sharded import Paths, ShardedSource, opened
from libai_data.data.sources.tar_index import TarIndex, index_tar
from libai_data.errors import FormatError

_KIND = "webdataset 3"
_METADATA = re.compile("__[^/]*__(/|$)")


class WebDatasetSource(ShardedSource):
    """The samples of tar shards: dicts of "__key__", the path without endings, and a field of bytes for each ending.

    The first process that opens a shard reads its headers to find the samples, and stores their places in an index
    file. If the shard's size or modification time changes, it is indexed again. Endings are in lower case. As in
    WebDataset, the source skips everything but regular files, files without an ending, and files and outermost folders
    whose names begin and end with "__". It also skips hidden files. Names that leave the archive, hard links, data
    after the end of the archive, and two samples with one key raise an error. Tar files have checksums of headers, not
    of contents. If the headers of a sample are not those that were indexed, reading it raises an error.

    Args:
        paths: files, globs or folders; see `storage.listed`.
        cache_dir: folder for index files; see `record_index`.

    Raises:
        ConfigError: There is no such file, or no index can be written.
        FormatError: A shard is truncated, damaged, or has refused contents; the error shows the offset.
    """

    def __init__(self, paths: Paths, cache_dir: PathLike | None = None) -> None:
        files = opened(paths)
        super().__init__(files, [_Shard(file, cache_dir) for file in files])


class _Shard:
    def __init__(self, file: MappedFile, cache_dir: PathLike | None) -> None:
        self._file = file
        arrays = record_index(file, _KIND, lambda: _build(file), cache_dir)
        self._first, self._heads, self._starts, self._stops, self._sums, self._endings = arrays[:6]
        self._keys = PackedNames.from_numbers(*arrays[6:8])
        self._names = list(PackedNames.from_numbers(*arrays[8:]))

    def __len__(self) -> int:
        return len(self._first) - 1

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The samples of these rows, in this order; a FormatError if a sample's headers are not the indexed ones."""
        asked = np.asarray(rows, np.int64)
        firsts, afters = self._first[asked], self._first[asked + 1]
        counts = afters - firsts
        # The numbers of the members of all samples, concatenated.
        numbers = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        content, names = self._file.bytes, self._names
        heads, starts, stops = (column[numbers].tolist() for column in (self._heads, self._starts, self._stops))
        for head, start, expected in zip(heads, starts, self._sums[numbers].tolist()):
            if crc32(content[head:start]) != expected:
                row = rows[int(np.searchsorted(np.cumsum(counts), heads.index(head), "right"))]
                why = f"the header that was indexed is not there, {STALE_INDEX}"
                raise FormatError(f"{self._file.source}, record {row}, offset {head}: {why}")
        fields = zip(
            [names[ending] for ending in self._endings[numbers].tolist()],
            [content[start:stop] for start, stop in zip(starts, stops)],
        )
        found = []
        for key, count in zip(self._keys.many(asked), counts.tolist()):
            sample: dict[str, Any] = {"__key__": key}
            sample.update(next(fields) for _ in range(count))
            found.append(sample)
        return found


def _build(file: MappedFile) -> list[np.ndarray]:
    """The arrays of the index: each sample's first member; of each member, where its headers begin, where its content
    begins and ends, the CRC-32 of its headers, and its ending; the keys; the endings."""
    index = index_tar(file.path, called=file.source)
    first, numbers, endings = [0], array("q"), array("q")
    numbered: dict[str, int] = {}

    def keys() -> Iterator[str]:
        for key, sample in _samples(file, index):
            numbers.extend(sample.values())
            endings.extend(numbered.setdefault(ending, len(numbered)) for ending in sample)
            first.append(len(numbers))
            yield key

    packed = PackedNames.of(keys())
    stops = index.offsets + index.sizes
    heads = np.append(0, -(-stops[:-1] // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
    places = zip(heads.tolist(), index.offsets.tolist())
    sums = np.array([crc32(file.bytes[head:start]) for head, start in places], np.int64)
    members = [column[np.array(numbers)] for column in (heads, index.offsets, stops, sums)]
    return [np.array(first), *members, np.array(endings), *packed.numbers(), *PackedNames.of(numbered).numbers()]


def _samples(file: MappedFile, index: TarIndex) -> Iterator[tuple[str, dict[str, int]]]:
    """For each sample, its key, and a dict from ending to the number of the member."""
    seen: set[str] = set()
    members = ((number, *named) for number, named in enumerate(map(key_and_ending, index.names)) if named is not None)
    for key, of_sample in groupby(members, key=itemgetter(1)):
        sample: dict[str, int] = {}
        for number, _, ending in of_sample:
            if key in seen:
                why = f"the key {key!r} occurred before; the files of a sample must be consecutive"
                raise _refused(file, index, number, why)
            if ending in sample or ending == "__key__":
                raise _refused(file, index, number, f"a second field {ending!r} of the sample {key!r}")
            sample[ending] = number
        seen.add(key)
        yield key, sample


def _refused(file: MappedFile, index: TarIndex, number: int, why: str) -> FormatError:
    return FormatError(f"{file.source} at offset {int(index.offsets[number])}, {index.names[number]!r}: {why}")


def key_and_ending(path: str) -> tuple[str, str] | None:
    """The key of a member's sample and the name of the field; None if the file is no field."""
    folder, slash, name = path.rpartition("/")
    stem, dot, ending = name.partition(".")
    if not dot or not stem or _METADATA.match(path):
        return None
    return folder + slash + stem, ending.lower()
