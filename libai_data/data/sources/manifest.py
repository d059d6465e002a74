"""The manifest that `libai-data convert` writes beside its shards: their numbers of records, sizes and digests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from libai_data.data.json_text import parsed_json
from libai_data.data.sources.storage import listed
from libai_data.errors import ConfigError, FormatError

MANIFEST = ".libai_data_manifest.json"
"""The file that `libai-data convert` writes beside its shards."""
UNFINISHED = ".libai_data_parts"
"""The folder that `libai-data convert` keeps beside its shards until all of them are written."""


class Manifest(NamedTuple):
    """The content of a manifest."""

    plan: dict[str, Any]  # settings of the conversion
    shards: dict[str, dict[str, Any]]  # file name -> report, with `records` and `size`


def parsed_manifest(path: str, content: bytes) -> Manifest:
    """The manifest in the bytes of a file; a FormatError that names `path` if there is none."""
    try:
        found = parsed_json(content)
        shards = {name: {**shard, **_numbers(shard)} for name, shard in found["shards"].items()}
        return Manifest(dict(found.get("plan") or {}), shards)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(
            f"{path} is no manifest of 'libai-data convert' ({error!r}); remove it, or run the command again without it"
        ) from error


def _numbers(shard: Any) -> dict[str, int]:
    return {name: int(shard[name]) for name in ("records", "size")}


def places_of(folder: str, names: Iterable[str], files: Sequence[str]) -> dict[str, str]:
    """Where the shards of a manifest are, in its folder or below: name -> a file; a ConfigError if one is missing."""
    there, by_name = set(files), {path.rpartition("/")[2]: path for path in reversed(files)}
    direct = {name: f"{folder}/{name}" for name in names}
    found = {name: path if path in there else by_name.get(name, "") for name, path in direct.items()}
    missing = sorted(name for name, path in found.items() if not path)
    if missing:
        raise ConfigError(
            f"{folder} has no {missing[0]}, which its manifest lists ({len(missing)} shards are missing); copy the "
            "missing shards, run 'libai-data convert' again, or name the shards to read by a glob"
        )
    return found


def check_finished(folder: Path) -> None:
    """Refuse a folder of this machine in which `libai-data convert` is not finished, with a ConfigError."""
    if os.path.isdir(folder / UNFINISHED):
        raise ConfigError(
            f"'libai-data convert' did not finish the shards in {folder}; run the command again, or name the shards to "
            "read by a glob"
        )


def check_complete(folder: Path) -> None:
    """Refuse a folder of this machine that lacks shards of `libai-data convert`, with a ConfigError, or has other ones
    or an unreadable manifest, with a FormatError."""
    check_finished(folder)
    path = folder / MANIFEST
    if not path.exists():
        return
    shards = parsed_manifest(str(path), path.read_bytes()).shards
    files = [str(folder / name) for name in shards if (folder / name).exists()]
    found = places_of(str(folder), shards, files if len(files) == len(shards) else listed(folder))
    for name, shard in found.items():
        check_size(shard, os.path.getsize(shard), shards[name]["size"])


def check_size(path: str, size: int | None, expected: int | None) -> None:
    """Raise a FormatError if a shard has another size in bytes than the table or manifest beside it says."""
    if expected not in (None, size):
        raise FormatError(
            f"{path} has {size} bytes, but the table or manifest beside it says {expected}; copy the shard again, or "
            "remove the table or manifest if the shard is right"
        )
