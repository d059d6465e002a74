"""The documents of a piece of a corpus, and the reasons why lines have no document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Union

from libai_data.data.sources.json_lines import parsed_object
from libai_data.data.text.files import JSON_LINES, PARQUET, Broken, open_parquet
from libai_data.data.text.parts import Piece
from libai_data.errors import ConfigError, FormatError, nearest
from libai_data.errors.argument_rules import FIELD_NAMES

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ROWS = 1024


class Document(NamedTuple):
    """A document."""

    line: int  # the first of its lines (or rows), from 1, counted from the beginning of the piece
    texts: tuple[str, ...]  # one for each key


class BadLine(NamedTuple):
    """A line without a document; line 0 is the file itself."""

    line: int
    reason: str


Record = Union[Document, BadLine]


def read_piece(piece: Piece, keys: Sequence[str]) -> Iterator[Record]:
    """The documents and bad lines of a piece, in order; lines of white space alone are neither.

    A line of plain text is a document. Lines end with LF, CRLF or CR.

    Args:
        keys: the keys of JSON objects, or columns, that hold text. Plain text is the text of each of them.
    """
    if piece.format == PARQUET:
        # A file that cannot be opened has a problem, and no row groups.
        if piece.stop:
            yield from _rows(piece, keys)
    else:
        is_json = piece.format == JSON_LINES
        for line, data in _lines(piece.read()):
            record: Record
            try:
                text = data.decode("utf-8")
                record = _texts_of(line, parsed_object(text), keys) if is_json else Document(line, (text,) * len(keys))
            except UnicodeDecodeError as error:
                record = BadLine(line, f"not UTF-8: {error.reason} at byte {error.start}")
            except FormatError as error:
                record = BadLine(line, str(error))
            yield record
    if piece.problem:
        yield BadLine(0, piece.problem)


def check_keys(keys: Sequence[str]) -> None:
    """Raise a ConfigError if the keys of texts are no list of one or more names, each once."""
    if not FIELD_NAMES.accepts(keys):
        given = [*keys] if isinstance(keys, tuple) else keys
        raise ConfigError(f"the keys of texts (--json-keys) are {given!r}; give one or more, each once, as a list")


def count_lines(piece: Piece) -> int:
    """The number of lines of a piece that is not of Parquet; the lines of the next piece are numbered from there on."""
    data = piece.read()
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank. Files that were joined have byte order marks at the beginning of any line."""
    for line, marked in enumerate(data.splitlines(), 1):
        content = marked.removeprefix(_BYTE_ORDER_MARK)
        if content and not content.isspace():
            yield line, content


def _texts_of(line: int, found: Any, keys: Sequence[str]) -> Record:
    texts = []
    for key in keys:
        if key not in found:
            return BadLine(line, _missing(key, found))
        text = found[key]
        if not isinstance(text, str):
            return BadLine(line, f"{key!r} is a {type(text).__name__}, but text is expected")
        try:
            # JSON may contain lone surrogates, which no tokenizer accepts.
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return BadLine(line, f"{key!r} is not Unicode text: {error.reason} at character {error.start}")
        texts.append(text)
    return Document(line, tuple(texts))


def _missing(key: str, there: Iterable[str]) -> str:
    return f"no {key!r}; there are {sorted(there)[:20]}.{nearest(key, there)}"


def _rows(piece: Piece, keys: Sequence[str]) -> Iterator[Record]:
    row = 0
    try:
        with open_parquet(Path(piece.path)) as file:
            columns = file.schema_arrow.names
            missing = [key for key in keys if key not in columns]
            if missing:
                yield BadLine(0, _missing(missing[0], columns))
                return
            twice = [key for key in keys if columns.count(key) > 1]
            if twice:
                yield BadLine(0, f"several columns are called {twice[0]!r}; rename them")
                return
            groups = list(range(piece.start, piece.stop))
            for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=list(keys)):
                for found in batch.to_pylist():
                    row += 1
                    yield _texts_of(row, found, keys)
    except Broken as broken:
        yield BadLine(row + 1, str(broken))
