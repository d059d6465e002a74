"""Writes `.bin/.idx` files from a stream of tokens, and merges such files; see `indexed_format`."""

from __future__ import annotations

import contextlib
import os
import secrets
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from libai_data.atomic_files import named_if_full
from libai_data.data.sources.indexed import IndexedSource
from libai_data.data.sources.indexed_format import LARGEST_SEQUENCE, code_of, index_header
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import OUTPUT, PATH, check, each

_SMALL_VOCABULARY = 65500
_COPIED_AT_ONCE = 1 << 24
_PREFIXES = each(PATH)


def dtype_for(vocab_size: int) -> np.dtype:
    """The dtype that LiBai uses for the tokens of a vocabulary: uint16 below 65,500 tokens, otherwise int32."""
    return np.dtype(np.uint16 if vocab_size < _SMALL_VOCABULARY else np.int32)


class IndexedWriter:
    """Writes sequences as a stream; needs 4 bytes of memory per sequence and 8 per document.

    The files get their names when the writer is closed, the `.idx` file last. So an `.idx` file always belongs to a
    complete pair. If an exception ends a `with` block, the writer deletes the partial files.

    Args:
        prefix: path of the two files without their endings; the folder is created.
        dtype: dtype of the tokens: uint8, int8, int16, uint16, int32 or int64.

    Raises:
        ConfigError: The format has no such dtype, or no files can be written at this path.
    """

    def __init__(self, prefix: str | Path, dtype: Any = np.uint16) -> None:
        code_of(dtype)
        check({"prefix": OUTPUT}, prefix=prefix)
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        self._limits = np.iinfo(self.dtype)
        self._sizes = array("i")
        self._documents = array("q", [0])
        name = secrets.token_hex(4)
        self._unfinished = [Path(f"{self.prefix}{ending}.{name}.unfinished") for ending in (".bin", ".idx")]
        try:
            self._unfinished[0].parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO | None = self._unfinished[0].open("wb")
        except OSError as error:
            raise ConfigError(
                f"no files can be written at {self.prefix} ({error.strerror}); give another path"
            ) from error

    def add_sequence(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Append a sequence to the current document.

        Args:
            tokens: integers [n], n may be 0.

        Raises:
            ValueError: `tokens` is no vector of integers, has more than 2**31 - 1, or one does not fit the dtype.
        """
        values = np.asarray(tokens)
        if values.ndim != 1 or (values.dtype.kind not in "iu" and len(values)):
            raise ValueError(f"a sequence is a vector of integers, not {values.dtype} {list(values.shape)}")
        if values.dtype != self.dtype:
            self._check_range(values)
            values = values.astype(self.dtype)
        if len(values) > LARGEST_SEQUENCE:
            raise ValueError(f"a sequence has {len(values)} tokens, but may have {LARGEST_SEQUENCE}; cut it")
        self._write(np.ascontiguousarray(values).data)
        self._sizes.append(len(values))

    def end_document(self) -> None:
        """End the current document: it has all sequences since the last end, possibly none."""
        self._documents.append(len(self._sizes))

    def add_document(self, sequences: Iterable[np.ndarray | Sequence[int]]) -> None:
        """Write a document of several sequences, such as its sentences; see `add_sequence`. If this fails, the file has
        nothing of the document, and a later call may write another one."""
        file, before = self._opened, len(self._sizes)
        place = file.tell()
        try:
            for sequence in sequences:
                self.add_sequence(sequence)
        except BaseException:
            del self._sizes[before:]
            # If the disk is full, this may fail. Then the two files do not fit each other, and readers refuse them.
            with contextlib.suppress(OSError):
                file.seek(place)
                file.truncate()
            raise
        self.end_document()

    def add_source(self, source: IndexedSource | str | Path) -> None:
        """Append all documents of another pair of files.

        Args:
            source: the other pair, or its prefix.

        Raises:
            ConfigError: The other pair has another dtype.
            ValueError: The current document has not been ended.
        """
        other = source if isinstance(source, IndexedSource) else IndexedSource(source)
        if other.dtype != self.dtype:
            raise ConfigError(f"{other.prefix} has {other.dtype} tokens, {self.prefix} has {self.dtype}")
        self._check_ended()
        for first in range(0, len(other.tokens), _COPIED_AT_ONCE):
            self._write(other.tokens[first : first + _COPIED_AT_ONCE].data)
        before = len(self._sizes)
        self._sizes.frombytes(other.sizes.tobytes())
        self._documents.frombytes((other.doc_idx[1:] + before).tobytes())

    def close(self) -> None:
        """Finish the two files, and rename them to their final names.

        Raises:
            ValueError: The last document has not been ended.
        """
        if self._file is None:
            return
        self._check_ended()
        with named_if_full(self.prefix + ".bin"):
            self._file.close()
        sizes = np.frombuffer(self._sizes, np.int32) if self._sizes else np.empty(0, np.int32)
        with named_if_full(self.prefix + ".idx"), open(self._unfinished[1], "wb") as file:
            file.write(index_header(self.dtype, len(sizes), len(self._documents)))
            file.write(sizes.data)
            pointers = np.cumsum(sizes, dtype=np.int64)
            pointers -= sizes
            pointers *= self.dtype.itemsize
            file.write(pointers.data)
            file.write(self._documents)
        # At no time may there be an `.idx` file with the `.bin` file of another pair.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.prefix + ".idx")
        os.replace(self._unfinished[0], self.prefix + ".bin")
        os.replace(self._unfinished[1], self.prefix + ".idx")
        self._file = None

    def discard(self) -> None:
        """Remove the unfinished files; older files with the final names stay."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # If the disk is full, the buffered bytes cannot be written.
                self._file.close()
            self._file = None
            for path in self._unfinished:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.discard()

    @property
    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise ValueError(f"the writer of {self.prefix} is closed")
        return self._file

    def _write(self, data: memoryview) -> None:
        with named_if_full(self.prefix + ".bin"):
            self._opened.write(data)

    def _check_range(self, values: np.ndarray) -> None:
        if not len(values):
            return
        low, high = int(values.min()), int(values.max())
        if low < self._limits.min or high > self._limits.max:
            place = int(np.argmax((values < self._limits.min) | (values > self._limits.max)))
            raise ValueError(
                f"token {values[place]} at place {place} of sequence {len(self._sizes)} does not fit {self.dtype} "
                f"({self._limits.min} to {self._limits.max}); write {self.prefix} with a larger dtype"
            )

    def _check_ended(self) -> None:
        left = len(self._sizes) - self._documents[-1]
        if left:
            raise ValueError(f"the last {left} sequences of {self.prefix} belong to no document; call end_document()")


def merge_indexed(prefixes: Sequence[str | Path], target: str | Path) -> None:
    """Concatenate several pairs of files.

    Args:
        prefixes: prefixes of at least one pair, all of the same dtype.
        target: prefix of the pair to write.

    Raises:
        ConfigError: `prefixes` is empty or has the target, a file is missing, or dtypes differ.
        FormatError: A file is broken.
    """
    check({"prefixes": _PREFIXES, "prefix": OUTPUT}, prefixes=prefixes, prefix=target)
    if not prefixes:
        raise ConfigError(f"nothing to merge into {target}: give at least one prefix")
    sources = [IndexedSource(prefix) for prefix in prefixes]
    if os.path.realpath(f"{target}.bin") in [os.path.realpath(f"{source.prefix}.bin") for source in sources]:
        raise ConfigError(
            f"target is {target}, which is one of the prefixes, and would be overwritten; give another path"
        )
    with IndexedWriter(target, sources[0].dtype) as writer:
        for source in sources:
            writer.add_source(source)
