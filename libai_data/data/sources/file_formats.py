"""The format of files, by the endings of their names."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from glob import escape, iglob
from pathlib import Path
from typing import Any

from libai_data.errors import ConfigError

logger = logging.getLogger(__name__)

_OF_ENDING = {
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
    ".tar": "webdataset",
    ".parquet": "parquet",
    ".mds": "mds",
    ".bin": "litdata",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".npy": "numpy",
    ".npz": "numpy",
}
_COMPRESSION = re.compile(r"\.(gz|bz2|xz|zstd?|lz4)$")

# Names that begin with "." are hidden. The others are files without samples, of Spark, Dask, Databricks and datasets.
_LEFT_OUT = re.compile(r"(^|/)(\.|(_(SUCCESS|(common_)?metadata|(started|committed)_[0-9]+)|dataset_infos?\.json)$)")
# A folder of a partition of Hive, and the log of a table of Delta Lake or Iceberg.
_PARTITION = re.compile(r"/([^/=]+)=[^/]*(?=/)")
_LOG = re.compile(r"(^|/)(_delta_log/|metadata/[^/]*\.metadata\.json$)")


def is_left_out(path: str) -> bool:
    """Whether a path within a folder of samples (with "/") is a file or folder that is none of the samples."""
    return _LEFT_OUT.search(path) is not None


def problem_of_pointer(content: bytes) -> str:
    """What is wrong with a file that begins with these bytes, if it is a pointer of Git LFS; else "".

    Source: github.com/git-lfs/git-lfs, `docs/spec.md`, "The Pointer".
    """
    is_pointer = content.startswith(b"version https://git-lfs.github.com/spec/")
    return "the file is a pointer of Git LFS, without its content; run `git lfs pull`" * is_pointer


def check_no_table(pattern: str, files: Sequence[str], is_local: bool = False) -> None:
    """Raise a ConfigError if a glob or a folder names files of a table of Delta Lake, Iceberg or Hudi; with `is_local`,
    also if a log is beside the folders of the files.

    Only the log of the table says which files have rows of its current version. The others have removed rows.
    """
    found = next(filter(_LOG.search, files), "")
    if is_local and not found:
        folders = {os.path.dirname(path) for path in files if path.lower().endswith(".parquet")}
        roots = {re.sub(r"(/[^/]*=[^/]*)+$", "", os.path.abspath(folder)) for folder in folders}
        near = {*roots, *map(os.path.dirname, roots), *([pattern] if folders and os.path.isdir(pattern) else [])}
        found = next(filter(None, map(_log_of, sorted(near))), "")
    if found:
        raise ConfigError(
            f"{pattern} belongs to a table with the log {found}. Only the log says which files have current rows, so "
            "export the table to plain Parquet files, or give the list of its current files, such as "
            "DeltaTable(...).file_uris()"
        )


def _log_of(folder: str) -> str:
    """The log of the table that a folder is; "" if it is none."""
    logs = (f"{folder}/{name}" for name in ("_delta_log", ".hoodie"))
    iceberg = iglob(f"{escape(folder)}/metadata/*.metadata.json")
    return next(filter(os.path.isdir, logs), "") or next(iceberg, "")


def warn_of_partitions(path: str, known: Sequence[str] = ()) -> None:
    """Warn of columns that only the names of folders have, such as `year=2024/a.parquet`, and not the `known` columns
    of the rows. The folders of all files have the same, so `path` is that of the first file."""
    names = [name for name in _PARTITION.findall(path) if name not in known]
    if names:
        logger.warning(
            "The rows have no %s: only the names of folders have these values, as in %s. If you need them, write them "
            "to the files as columns.",
            names,
            path,
        )


def format_of_files(paths: Any, files: Sequence[str], formats: Iterable[str]) -> str:
    """The name of the one format that files have."""
    found = sorted({_format_of(path) for path in files})
    if len(found) != 1 or not found[0]:
        endings = sorted({Path(path).suffix for path in files})
        raise ConfigError(
            f"the files of {paths} end with {endings}, which belong to no single format; name the files by a glob, or "
            f"the format: {list(formats)}"
        )
    return found[0]


def _format_of(path: str) -> str:
    # Shards of ArrayRecord are often called "x.array_record-00001-of-00008", compressed ones of MDS "x.mds.zstd". The
    # sources of other compressed files say that they cannot read them.
    _, ending = os.path.splitext(_COMPRESSION.sub("", path.lower()))
    return _OF_ENDING.get(ending, "") or _OF_ENDING.get(ending.partition("-")[0], "")
