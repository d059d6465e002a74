"""Reads the descriptions of shards in the `index.json` of a folder: shards of MDS, or chunks of LitData.

Formats: github.com/mosaicml/streaming, `streaming/base/format/mds`; github.com/Lightning-AI/litData,
`src/litdata/streaming/writer.py`, with samples as trees as in PyTorch's `torch/utils/_pytree.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

from libai_data.data.json_text import parsed_json
from libai_data.data.sources.column_names import columns_differ
from libai_data.data.sources.storage import LocalFile
from libai_data.errors import ConfigError, FormatError, first_repeated

INDEX = "index.json"
_SHARD = re.compile(r"\.mds|\.bin$")
_MDS_VERSION = 2
_MOST_SAMPLES = 1 << 32
# Encodings whose values are of one kind; numbers may have any size.
_KINDS = {
    **dict.fromkeys(("uint", "str_int"), "int"),
    "str_float": "float",
    "text": "str",
    **dict.fromkeys(("jpeg", "png", "image", "tiff", "tifffile", "file"), "bytes"),
    **dict.fromkeys(("pil", "numpy", "tensor", "no_header_numpy", "no_header_tensor"), "ndarray"),
    **dict.fromkeys(("jpegarray", "list[jpeg]", "list[png]"), "jpeg_array"),
}
_NAMED, _NUMBERED = ("builtins.dict", "collections.OrderedDict"), ("builtins.tuple", "builtins.list")


class Column(NamedTuple):
    """A value that each sample has."""

    name: str  # of the value in a record
    encoding: str  # how the value is stored
    size: Optional[int]  # bytes; 0 if each sample stores the size of its value, None if it is the whole sample


class DescribedShard(NamedTuple):
    """The description of a shard in an index."""

    name: str  # path of the file, from the folder of the index
    size: int  # of the file, in bytes
    slack: int  # bytes that the file may have in addition to `size`, all of them or none
    digests: Mapping[str, str]  # algorithm -> hexadecimal digest of the file
    packed: str  # path of the compressed file; "" if there is none
    compression: str  # method of the compressed file
    samples: int
    columns: tuple[Column, ...]
    compressed: str = ""  # what is compressed in the file: each "batch" of samples, each "sample", "" for nothing


def described_shards(
    files: Sequence[str], format: str, columns: Sequence[str] | None = None
) -> dict[str, DescribedShard]:
    """Path -> description of a shard, in the order of the indices if `files` has indices, and otherwise of `files`.

    Args:
        files: paths of shards and indices. Without indices, those in the folders of the shards are read.
        format: a key of `DESCRIBED`.
        columns: names of the columns that shards with samples must have in common; by default all.

    Raises:
        ConfigError: A shard is in no index, or does not exist.
        FormatError: An index does not have this format.
        SchemaError: The columns differ between the shards.
    """
    given = [path for path in files if path.rpartition("/")[2] == INDEX]
    indices = given or sorted({_beside(path, INDEX) for path in files})
    known: dict[str, DescribedShard] = {}
    there, claimed = set(files), set()
    for index in indices:
        for shard in _shards_of(index, format):
            paths = [_beside(index, name) for name in (shard.name, shard.packed) if name]
            # Both files exist if compressed files are kept.
            path = next((path for path in paths if path in there), "")
            if not path and given:
                raise ConfigError(f"{index} lists {paths[-1]}, which is not there")
            known.setdefault(path, shard)
            claimed.update(paths)
    unknown = [path for path in files if path not in claimed and _SHARD.search(path.rpartition("/")[2])]
    if unknown:
        raise ConfigError(f"{unknown[0]} is in no {INDEX} of {indices}")
    found = {path: known[path] for path in (known if given else files) if path in known}
    if not found:
        raise ConfigError(f"{indices} list none of the files {list(files)[:5]}; give folders of shards")
    _check_alike({path: shard for path, shard in found.items() if shard.samples}, columns)
    return found


def _check_alike(shards: Mapping[str, DescribedShard], columns: Sequence[str] | None) -> None:
    first = next(iter(shards), "")
    for path, shard in shards.items():
        if shard.columns == shards[first].columns:
            continue
        ours, theirs = (
            {name: encoding for name, encoding, _ in each.columns if columns is None or name in columns}
            for each in (shard, shards[first])
        )
        differ = [name for name in {**theirs, **ours} if _kind(ours.get(name)) != _kind(theirs.get(name))]
        if differ:
            raise columns_differ(differ, path, ours, first, theirs)


def _kind(encoding: str | None) -> str:
    name = (encoding or "").partition(":")[0].rstrip("0123456789")
    return _KINDS.get(name, name)


def is_raw(path: str) -> bool:
    """Whether the name of a shard is that of a file without compression."""
    name = path.rpartition("/")[2]
    return name.endswith(".mds") or (name.endswith(".bin") and ".zstd" not in name)


def _beside(path: str, name: str) -> str:
    folder, slash, _ = path.rpartition("/")
    return f"{folder}{slash}{name}"


def _shards_of(index: str, format: str) -> list[DescribedShard]:
    with LocalFile(index) as file:
        content = Path(file.path).read_bytes()
    what, read = DESCRIBED[format]
    try:
        shards = read(parsed_json(content))
        for shard in shards:
            _check(shard)
        repeated = first_repeated(shard.name for shard in shards)
        if repeated is not None:
            raise ValueError(f"it lists {repeated} twice")
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{index} is no index of {what}: {type(error).__name__}: {error}") from error
    return shards


def _check(shard: DescribedShard) -> None:
    if not shard.name:
        raise ValueError("a shard has no name")
    for name in (shard.name, shard.packed):
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"the name {name!r} leads out of its folder")
    if not all(isinstance(text, str) for column in shard.columns for text in column[:2]):
        raise TypeError("the name or encoding of a column is no text")
    if not 0 <= shard.samples < _MOST_SAMPLES or min([shard.size, *(column.size or 0 for column in shard.columns)]) < 0:
        raise ValueError("a number of samples or bytes is below 0, or too large")


def _mds_shard(shard: Any) -> DescribedShard:
    if (shard["format"], shard["version"]) != ("mds", _MDS_VERSION):
        raise ValueError(f"a shard has the format {shard['format']!r}, version {shard['version']}; MDS 2 is read")
    raw, packed = shard["raw_data"], shard.get("zip_data") or {"basename": ""}
    names, encodings, sizes = (shard[f"column_{what}"] for what in ("names", "encodings", "sizes"))
    if not len(names) == len(encodings) == len(sizes):
        raise ValueError(f"there are {len(names)} names of columns, but not as many encodings and sizes")
    columns = tuple(Column(name, encoding, int(size or 0)) for name, encoding, size in zip(names, encodings, sizes))
    digests, compression = dict(raw.get("hashes") or {}), str(shard.get("compression") or "").partition(":")[0]
    samples = int(shard["samples"])
    return DescribedShard(
        raw["basename"], int(raw["bytes"]), 0, digests, packed["basename"], compression, samples, columns
    )


def _of_litdata(content: Any) -> list[DescribedShard]:
    config = content["config"]
    columns, compression = _litdata_columns(config), config.get("compression") or ""
    tokens = tuple(column._replace(size=None) for column in columns)
    found = []
    for chunk in content["chunks"]:
        name, samples, size = chunk["filename"], int(chunk["chunk_size"]), int(chunk["chunk_bytes"])
        raw = name.replace(f".{compression}", "") if compression else name
        packed, method = "" if raw == name else name, compression.partition(":")[0]
        slack = 4 * samples + 8  # Before version 0.2.40, sizes leave out the table of starts.
        # A sample of tokens is one value without a size. If no loader is named, only chunks of tokens have a `dim`.
        is_tokens = config.get("item_loader") == "TokensLoader" or chunk.get("dim")
        if is_tokens and len(columns) != 1:
            raise ValueError(f"it has tokens, but {len(columns)} values in each sample")
        found.append(DescribedShard(raw, size, slack, {}, packed, method, samples, tokens if is_tokens else columns))
    level = config.get("compression_level") or "chunk"
    if level not in ("chunk", "batch", "sample"):
        raise ValueError(f"its compression_level is {level!r}; 'chunk', 'batch' and 'sample' are read")
    return found if level == "chunk" else [shard._replace(compressed=level) for shard in found]


def _litdata_columns(config: Any) -> tuple[Column, ...]:
    if config.get("encryption"):
        raise ValueError("its chunks are encrypted")
    loader = config.get("item_loader")
    if loader not in (None, "PyTreeLoader", "TokensLoader"):
        raise ValueError(f"its chunks are for {loader}; those for PyTreeLoader and TokensLoader are read")
    names, encodings = _leaves(parsed_json(config["data_spec"])[1]), config["data_format"]
    if len(names) != len(encodings) or len(set(names)) != len(names):
        raise ValueError(f"its data_spec has the values {names}, where its data_format has {encodings}")
    return tuple(Column(name, encoding, 0) for name, encoding in zip(names, encodings))


def _leaves(spec: Any, name: str = "") -> list[str]:
    """The names of the leaves of a tree: `outer.inner` for nested leaves, numbers for lists and tuples."""
    kind, children = spec["type"], spec["children_spec"]
    if kind is None:
        return [name or "0"]
    if kind not in (*_NAMED, *_NUMBERED):
        raise ValueError(f"its samples have a {kind}; dicts, lists and tuples are read")
    keys = parsed_json(spec["context"]) if kind in _NAMED else range(len(children))
    if len(keys) != len(children):
        raise ValueError(f"its data_spec has {len(children)} values for the names {keys}")
    named = [(f"{name}.{key}" if name else str(key), child) for key, child in zip(keys, children)]
    return [leaf for inner, child in named for leaf in _leaves(child, inner)]


DESCRIBED: dict[str, tuple[str, Callable[[Any], list[DescribedShard]]]] = {
    "mds": ("MDS shards", lambda content: [*map(_mds_shard, content["shards"])]),
    "litdata": ("LitData chunks", _of_litdata),
}
"""Formats whose index describes each shard -> name of the shards in errors, and the function that reads the index."""
