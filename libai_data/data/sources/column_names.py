"""Which columns of a file are read, and the errors if columns are missing or differ between files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libai_data.errors import ConfigError, FormatError, SchemaError, first_repeated, nearest


def chosen_columns(known: Sequence[str], columns: Any, path: Any) -> list[str]:
    """Names of the columns to read: `columns`, or all known ones if it is None. A ConfigError if a column is unknown; a
    FormatError if the file has several columns of a name."""
    for name in columns or ():
        if name not in known:
            raise ConfigError(f"{path} has no column {name!r}; there are {list(known)}.{nearest(name, known)}")
    chosen = list(known if columns is None else columns)
    twice = first_repeated(name for name in known if columns is None or name in columns)
    if twice is not None:
        raise FormatError(f"{path} has several columns {twice!r}; rename them, or read other columns (columns=[...])")
    return chosen


def columns_differ(
    names: Sequence[str], path: str, ours: Mapping[str, Any], first: str, theirs: Mapping[str, Any]
) -> SchemaError:
    """The error for a file and the first one, of which columns have other types or are missing."""
    found, expected = ({name: str(types.get(name)) for name in names} for types in (ours, theirs))
    return SchemaError(
        f"the files differ: {path} has the columns {found}, {first} {expected}; write all files with the same columns "
        "and types, or read only columns that are alike (columns=[...])"
    )
