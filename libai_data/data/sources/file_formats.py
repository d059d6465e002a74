"""The format of files, by the endings of their names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from libai_data.errors import ConfigError

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

# Names that begin with "." are hidden. The others are files without samples, of Spark, Dask and Databricks.
_LEFT_OUT = re.compile(r"(^|/)(\.|_(SUCCESS|(common_)?metadata|(started|committed)_[0-9]+)$)")


def is_left_out(path: str) -> bool:
    """Whether a file or folder inside a folder of samples is not one of its samples.

    Args:
        path: its path from the folder on, with "/".
    """
    return _LEFT_OUT.search(path) is not None


def format_of_files(paths: Any, files: Sequence[str], formats: Iterable[str]) -> str:
    """The name of the one format that files have."""
    found = sorted({_format_of(path) for path in files})
    if len(found) != 1 or not found[0]:
        endings = sorted({Path(path).suffix for path in files})
        raise ConfigError(
            f"the files of {paths} end with {endings}, which belong to no single format; name it: {list(formats)}"
        )
    return found[0]


def _format_of(path: str) -> str:
    # Shards of ArrayRecord are often called "x.array_record-00001-of-00008", compressed ones of MDS "x.mds.zstd".
    path = path.lower()
    _, ending = os.path.splitext(path.removesuffix(".zstd") if path.endswith(".mds.zstd") else path)
    return _OF_ENDING.get(ending, "") or _OF_ENDING.get(ending.partition("-")[0], "")
