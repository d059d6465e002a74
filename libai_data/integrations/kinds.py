"""Which tool an iterable comes from, without importing any of them."""

from __future__ import annotations

import copy
from typing import Any

from libai_data.errors import ConfigError


def is_torch_loader(thing: Any) -> bool:
    """Whether it is a torch `DataLoader`, or of a class derived from it, as torchdata's `StatefulDataLoader`."""
    return _derives_from(thing, "torch.utils.data", "DataLoader")


def is_dali(thing: Any) -> bool:
    """Whether it is one of DALI's iterators; they yield a list with the outputs of each pipeline."""
    return _derives_from(thing, "nvidia.dali")


def is_dali_pipeline(thing: Any) -> bool:
    """Whether it is a DALI pipeline, which no iterator has been made of."""
    return _derives_from(thing, "nvidia.dali", "Pipeline")


def is_ffcv(thing: Any) -> bool:
    """Whether it is FFCV's loader; it uses the memory of its batches again."""
    return _derives_from(thing, "ffcv")


def is_map_style(thing: Any) -> bool:
    """Whether samples can be had by their index: it has a length and `[index]`, and is no stream of torch's."""
    if not hasattr(thing, "__len__") or not hasattr(thing, "__getitem__") or isinstance(thing, (str, bytes, dict)):
        return False
    return not _derives_from(thing, "torch.utils.data", "IterableDataset")


def without_node_splitting(thing: Any) -> Any:
    """A WebDataset pipeline without the stage that refuses several ranks, since here the mesh shards the samples.

    Raises:
        ConfigError: It shards by itself, so that the ranks would not see the same stream.
    """
    if not _derives_from(thing, "webdataset") or not isinstance(getattr(thing, "pipeline", None), list):
        return thing
    names = [getattr(stage, "__name__", "") for stage in thing.pipeline]
    if "split_by_node" in names:
        raise ConfigError(
            "this WebDataset pipeline has split_by_node, but the loader shards over the mesh; leave nodesplitter out"
        )
    whole = copy.copy(thing)
    whole.pipeline = [stage for stage, name in zip(thing.pipeline, names) if name != "single_node_only"]
    return whole


def _derives_from(thing: Any, package: str, name: str = "") -> bool:
    return any(
        (base.__module__ == package or base.__module__.startswith(f"{package}.")) and name in ("", base.__name__)
        for base in type(thing).__mro__
    )
