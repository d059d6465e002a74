"""Reads tokens from `.bin/.idx` files of LiBai and Megatron-LM; see `indexed_format`."""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

import numpy as np

from libai_data.data.cached_property import cached_property
from libai_data.data.datasets.shares import shares_of
from libai_data.data.files.identity import key_of
from libai_data.data.files.index_cache import cached_arrays
from libai_data.data.sources.indexed_format import parse_index
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.paths import checked_path, is_file, why_missing
from libai_data.data.sources.record_index import index_folder
from libai_data.errors import ConfigError, nearest

_HASHED_AT_ONCE = 1 << 24


class IndexedSource:
    """The sequences of tokens in `<prefix>.bin` and `<prefix>.idx`, read from the memory map without a copy.

    A document has any number of sequences, such as its sentences. After unpickling, the source opens the files again.

    Args:
        prefix: path of the two files without their endings.

    Attributes:
        dtype: of the tokens.
        sizes: int32 [sequences], tokens of each sequence.
        doc_idx: int64 [documents + 1], the first sequence of each document, and the number of sequences at the end.
        num_documents: the number of documents.

    Raises:
        ConfigError: A file is missing.
        FormatError: A file is truncated, of another format, or does not fit the other; the message has the offset.
    """

    def __init__(self, prefix: str | Path) -> None:
        checked = str(checked_path("prefix", prefix))
        self._open(checked, [_file(checked, ending) for ending in (".idx", ".bin")])

    def _open(self, prefix: str, files: Sequence[MappedFile], part: tuple[int, int] | None = None) -> None:
        self.prefix, self._files, self._part = prefix, files, part
        content, data = (file.array for file in files)
        index = parse_index(content, len(data), f"{self.prefix}.idx")
        self.dtype, self.sizes, self._pointers, self.doc_idx = index
        self._tokens: np.ndarray = data.view(self.dtype)
        if part is not None:
            self._keep_documents(*part)
        self.num_documents = len(self.doc_idx) - 1

    def _keep_documents(self, first: int, stop: int) -> None:
        documents = self.doc_idx[first : stop + 1]
        sequences = slice(int(documents[0]), int(documents[-1]))
        start, end = self._offsets_of(documents[[0, -1]])
        pointers = self._pointers[sequences]
        if sequences.start:
            # The first part is usually the training part and the longest, so it stays a view of the file.
            pointers, documents = pointers - start * self.dtype.itemsize, documents - documents[0]
        self.sizes, self._pointers, self.doc_idx = self.sizes[sequences], pointers, documents
        self._tokens = self._tokens[start:end]

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, one sequence after the other, [tokens]; a FormatError if the file was written to."""
        self._files[1].check_not_written()
        return self._tokens

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> np.ndarray:
        """The tokens of a sequence, as a view of the memory map; negative numbers count from the end. An IndexError if
        there is no such sequence."""
        number = _checked(number, len(self), "sequences", self.prefix)
        start = int(self._pointers[number]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sizes[number])]

    def document(self, number: int) -> np.ndarray:
        """The tokens of all sequences of a document, a view of the memory map; an IndexError if there is no such
        document."""
        number = _checked(number, self.num_documents, "documents", self.prefix)
        start, stop = self._offsets_of(self.doc_idx[number : number + 2])
        return self.tokens[start:stop]

    @property
    def identity(self) -> list[Any]:
        """The identity of the two files as they are now; see `libai_data.data.files.identity`."""
        return [file.current_identity() for file in self._files]

    def document_offsets(self, first: int = 0, stop: int | None = None) -> np.ndarray:
        """The places in `tokens` at which documents begin, and the end of the last one, int64 [documents + 1]; only
        those from number `first` to before `stop`."""
        return self._offsets_of(self.doc_idx[first:stop])

    def _offsets_of(self, sequences: np.ndarray) -> np.ndarray:
        if not len(self):
            return np.zeros(len(sequences), np.int64)
        inside = np.minimum(sequences, len(self) - 1)
        starts = self._pointers[inside] // self.dtype.itemsize
        # The number after the last sequence means the end of all tokens.
        starts[sequences == len(self)] = len(self.tokens)
        return starts

    def split(self, proportions: Sequence[float]) -> list[IndexedSource]:
        """Split the source into parts of contiguous documents, which together have all documents.

        Args:
            proportions: proportions of the parts' tokens, at least 0 each, and one above 0. A part ends at the end of a
                document, the nearest one.

        Raises:
            ConfigError: A proportion is negative or no number, or all are 0.
        """
        shares_of("proportions", proportions)
        ends = self.document_offsets()
        wanted = np.cumsum([0.0, *proportions]) / sum(proportions) * float(ends[-1])
        behind = np.clip(np.searchsorted(ends, wanted), 1, len(ends) - 1) if len(ends) > 1 else np.zeros_like(wanted)
        before = np.maximum(behind - 1, 0).astype(np.int64)
        nearest_ends = np.where(wanted - ends[before] <= ends[behind.astype(np.int64)] - wanted, before, behind)
        bounds = [0, *map(int, nearest_ends[1:-1]), self.num_documents]
        return [self._part_of(first, stop) for first, stop in zip(bounds, bounds[1:])]

    def _part_of(self, first: int, stop: int) -> IndexedSource:
        before = self._part[0] if self._part else 0
        part = type(self).__new__(type(self))
        part._open(self.prefix, self._files, (before + first, before + stop))
        return part

    @cached_property
    def fingerprint(self) -> str:
        """What a checkpoint stores to identify the data: a digest of dtype, sizes and documents, but not of tokens."""
        found = hashlib.blake2b(str(self.dtype).encode(), digest_size=16)
        for array in (self.sizes, self.doc_idx):
            found.update(str(len(array)).encode())
            for first in range(0, len(array), _HASHED_AT_ONCE):
                found.update(np.ascontiguousarray(array[first : first + _HASHED_AT_ONCE]).data)
        return found.hexdigest()

    def cached(
        self, kind: str, decides: Mapping[str, Any], build: Callable[[], Sequence[np.ndarray]], cache_dir: Any
    ) -> list[np.ndarray]:
        """The arrays of an index of samples, cached in `cache_dir`, by default `<prefix>.cache`; see `cached_arrays`.

        Args:
            kind: of the index; the name of its file begins with it.
            decides: all that the arrays depend on.
            build: makes the arrays, int64 [n] each.
            cache_dir: see `record_index.index_folder`.
        """
        key = f"{kind}-{key_of(json.dumps(decides, sort_keys=True))}"
        return cached_arrays(index_folder(cache_dir, Path(f"{self.prefix}.cache"), key), key, build)

    def __getstate__(self) -> tuple[str, Sequence[MappedFile], tuple[int, int] | None]:
        return self.prefix, self._files, self._part

    def __setstate__(self, opened: tuple[str, Sequence[MappedFile], tuple[int, int] | None]) -> None:
        self._open(*opened)


def _file(prefix: str, ending: str) -> MappedFile:
    path = Path(prefix + ending)
    if not is_file(path):
        there = [each.stem for each in path.parent.glob("*" + ending)] if os.path.isdir(path.parent) else []
        hint = nearest(Path(prefix).name, there)
        raise ConfigError(
            f"there is no file {path}{why_missing(path)}; give the path of a .bin and .idx file without the ending, as "
            f"libai-data preprocess prints it.{hint}"
        )
    return MappedFile(path)


def _checked(number: int, count: int, what: str, prefix: str) -> int:
    number = operator.index(number)
    if not -count <= number < count:
        raise IndexError(f"{number} is outside the {count} {what} of {prefix}")
    return number + count if number < 0 else number
