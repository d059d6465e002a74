"""Tokens from `.bin/.idx` files, as LiBai and Megatron-LM write them; see `indexed_format`."""

from __future__ import annotations

import hashlib
import operator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.errors import ConfigError, FormatError, nearest
from libai_data.data.files.file_map import FileMap, FileStatus
from libai_data.data.files.identity import file_identity
from libai_data.data.sources.indexed_format import SequenceIndex, parse_index

_HASHED_AT_ONCE = 1 << 24


class IndexedSource:
    """The sequences of tokens in `<prefix>.bin` and `<prefix>.idx`, read through the memory map without a copy.

    A document is one or more sequences, such as its sentences. Pickled, it opens the files anew.

    Args:
        prefix: path of the two files without their endings.

    Raises:
        ConfigError: A file is not there.
        FormatError: A file is truncated, of another format, or does not fit the other; with offset and numbers.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        maps = [_map(self.prefix, ending) for ending in (".idx", ".bin")]
        self._statuses = [each.status for each in maps]
        content, data = (each.array for each in maps)
        self._index: SequenceIndex = parse_index(content, len(data), f"{self.prefix}.idx")
        self.tokens: np.ndarray = data.view(self._index.dtype)
        """All tokens, one sequence behind the other."""

    def __len__(self) -> int:
        return len(self._index.sizes)

    def __getitem__(self, number: int) -> np.ndarray:
        """The tokens of a sequence: a view of the memory map."""
        return self.get(number)

    def get(self, number: int, offset: int = 0, length: Any = None) -> np.ndarray:
        """Some tokens of a sequence, as a view of the memory map.

        Args:
            number: of the sequence; negative ones count from the end.
            offset: the first token.
            length: how many; by default up to the sequence's end.

        Raises:
            IndexError: There is no such sequence, or the sequence has not that many tokens.
        """
        number = _checked(number, len(self), "sequences", self.prefix)
        size = int(self._index.sizes[number])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"tokens {offset} to {offset + length} of sequence {number}, which has {size} tokens")
        start = int(self._index.pointers[number]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    def document(self, number: int) -> np.ndarray:
        """The tokens of a document, of all its sequences; a view of the memory map.

        Raises:
            IndexError: There is no such document.
        """
        number = _checked(number, self.num_documents, "documents", self.prefix)
        start, stop = self._offsets_of(self._index.documents[number : number + 2])
        return self.tokens[start:stop]

    @property
    def identity(self) -> list[Any]:
        """The identity of the two files as they are now; see `libai_data.data.files.identity`."""
        return [file_identity(f"{self.prefix}{ending}") for ending in (".idx", ".bin")]

    @property
    def dtype(self) -> np.dtype:
        """Of the tokens."""
        return self._index.dtype

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each sequence, int32 [sequences]."""
        return self._index.sizes

    @property
    def doc_idx(self) -> np.ndarray:
        """The first sequence of each document, and the number of sequences at the end, int64 [documents + 1]."""
        return self._index.documents

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return len(self._index.documents) - 1

    def document_offsets(self) -> np.ndarray:
        """Place in `tokens` at which each document begins, and their end, int64 [documents + 1]."""
        return self._offsets_of(self._index.documents)

    def _offsets_of(self, sequences: np.ndarray) -> np.ndarray:
        if not len(self):
            return np.zeros(len(sequences), np.int64)
        inside = np.minimum(sequences, len(self) - 1)
        starts = self._index.pointers[inside] // self.dtype.itemsize
        # One behind the last sequence: the end of all tokens.
        starts[sequences == len(self)] = len(self.tokens)
        return starts

    @cached_property
    def fingerprint(self) -> str:
        """What a checkpoint keeps: a digest of dtype, sizes and documents, which are all but the tokens themselves."""
        found = hashlib.blake2b(str(self.dtype).encode(), digest_size=16)
        for array in (self._index.sizes, self._index.documents):
            found.update(str(len(array)).encode())
            for first in range(0, len(array), _HASHED_AT_ONCE):
                found.update(np.ascontiguousarray(array[first : first + _HASHED_AT_ONCE]).data)
        return found.hexdigest()

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _opened_again, (type(self), self.prefix, self._statuses)


def _opened_again(kind: type[IndexedSource], prefix: str, statuses: list[FileStatus]) -> IndexedSource:
    source = kind(prefix)
    if not all(map(FileStatus.is_same, source._statuses, statuses)):
        raise FormatError(
            f"{prefix}.bin and .idx have changed since they were opened: they were {statuses}, and are "
            f"{source._statuses}; open them anew"
        )
    return source


def _map(prefix: str, ending: str) -> FileMap:
    path = Path(prefix + ending)
    if not path.is_file():
        there = [each.stem for each in path.parent.glob("*" + ending)] if path.parent.is_dir() else []
        hint = nearest(Path(prefix).name, there)
        without = " Leave out the ending." if prefix.endswith((".bin", ".idx")) else ""
        raise ConfigError(f"there is no file {path}.{hint}{without}")
    return FileMap(path)


def _checked(number: int, count: int, what: str, prefix: str) -> int:
    number = operator.index(number)
    if not -count <= number < count:
        raise IndexError(f"{number} lies outside the {count} {what} of {prefix}")
    return number + count if number < 0 else number
