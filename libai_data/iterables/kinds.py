"""Which library an iterable comes from, found without importing any of these libraries."""

from __future__ import annotations

import copy
import gc
import itertools
from collections import abc
from collections.abc import Iterable, Iterator
from io import IOBase
from types import GeneratorType
from typing import Any, Callable

from libai_data.data.attributes import attribute_of, has_attribute
from libai_data.errors import ConfigError

_MOST_WRAPPERS = 16
_MOST_OBJECTS = 100
_ITERTOOLS = tuple(each for each in vars(itertools).values() if isinstance(each, type))
_DATA = ("torch.utils.data", "oneflow.utils.data")
_BARS = ("tqdm", "alive_progress", "progressbar", "fastprogress", "click", "enlighten", "rich")
_PIPES = ("torch.utils.data.datapipes", "torchdata.datapipes", "torchdata.dataloader2")
_REGROUPING = ("FlatMap", "FirstFitPack", "ConcatThenSplit")  # stages of Grain whose items are not those before
_LIGHTNING = ("pytorch_lightning", "lightning", "lightning_fabric")
_OWN_LOADERS = ("BatchLoader", "SharedLoader", "IterableLoader", "CombinedLoader", "LiBaiLoader")


def yields_batches(thing: Any) -> bool:
    """Whether `thing` is known to yield batches: a DataLoader of torch or OneFlow (or a subclass, as torchdata's), or
    its iterator, a pipeline of WebDataset, Grain, Hugging Face or torch (data pipes) with a batching stage, or a loader
    of Lightning, DALI or FFCV; also below a progress bar of tqdm."""
    thing = without_bar(thing)
    if is_loader(thing):
        # A loader with batch_size=None yields what its dataset yields.
        return thing.batch_sampler is not None or yields_batches(thing.dataset)
    if derives_from(thing, _DATA, "_BaseDataLoaderIter"):
        return bool(attribute_of(thing, "_auto_collation")) or yields_batches(attribute_of(thing, "_dataset"))
    if derives_from(thing, "webdataset") and isinstance(getattr(thing, "pipeline", None), list):
        said = [_batches_of_stage(stage) for stage in thing.pipeline]
        return next((each for each in reversed(said) if each is not None), False)
    if derives_from(thing, "grain"):
        said = [_batches_of_grain(stage) for stage in _stages_of_grain(thing)]
        return next((each for each in said if each is not None), False)
    if derives_from(thing, "datasets"):
        return _batches_of_hugging_face(thing)
    if derives_from(thing, _PIPES):
        said = [_batches_of_pipe(stage) for stage in _stages_of_pipe(thing)]
        return next((each for each in said if each is not None), False)
    if is_lightnings_combined_loader(thing):
        return True
    return derives_from(thing, "nvidia.dali") or derives_from(thing, "ffcv")


def _batches_of_hugging_face(stream: Any) -> bool:
    """Whether the last stage of a stream that groups or splits samples is `batch`."""
    stage = attribute_of(stream, "_ex_iterable")
    while stage is not None and not attribute_of(stage, "batched"):
        stage = attribute_of(stage, "ex_iterable")
    function = attribute_of(stage, "function")
    module, name = (str(attribute_of(function, key)) for key in ("__module__", "__name__"))
    return module.startswith("datasets.") and name.strip("_") in ("batch_fn", "batch_arrow_table")


def _batches_of_stage(stage: Any) -> bool | None:
    if is_loader(stage):
        return yields_batches(stage)
    name = getattr(getattr(stage, "f", stage), "__name__", "").strip("_")
    return {"batched": True, "unbatched": False}.get(name)


def _stages_of_grain(thing: Any) -> Iterator[Any]:
    """The stages of a pipeline of Grain, the last one first."""
    yield from reversed(getattr(thing, "_operations", ()))
    stages = [thing]
    while stages:
        yield stages[0]
        stages = list(attribute_of(stages[0], "_parents", ()))


def _batches_of_grain(stage: Any) -> bool | None:
    names = [base.__name__ for base in type(stage).__mro__ if base.__module__.startswith("grain.")]
    if any(name.startswith(_REGROUPING) for name in names):
        return False
    return True if any(name.startswith("Batch") for name in names) else None


def _stages_of_pipe(thing: Any) -> Iterator[Any]:
    """The stages of torch's data pipes, the last one first, up to one that joins several."""
    stages = [thing]
    while len(stages) == 1:
        yield stages[0]
        values = attribute_of(stages[0], "__dict__", {}).values()
        stages = [each for each in values if derives_from(each, _PIPES)]


def _batches_of_pipe(stage: Any) -> bool | None:
    name = type(stage).__name__.replace("IterDataPipe", "")
    return {"Collator": True, "UnBatcher": False, "FlatMapper": False}.get(name)


def is_lightnings_combined_loader(thing: Any) -> bool:
    """Whether `thing` joins several loaders of Lightning, of any version."""
    return derives_from(thing, _LIGHTNING, "CombinedLoader")


def is_loader(thing: Any) -> bool:
    """Whether `thing` is a DataLoader of torch or OneFlow, or of a subclass."""
    return derives_from(thing, _DATA, "DataLoader")


def dataset_name(thing: Any) -> str:
    """The name of a function, or of the class of the innermost dataset, such as the dataset of a torch DataLoader."""
    thing, seen = without_bar(thing), 0
    while has_attribute(thing, "dataset") and seen < _MOST_WRAPPERS:
        thing, seen = thing.dataset, seen + 1
    return str(attribute_of(thing, "__name__", type(thing).__name__))


def knows_its_rounds(thing: Any) -> bool:
    """Whether no epoch depends on earlier epochs: it is a list or of Grain, has `set_epoch`, or reads in order."""
    if isinstance(thing, abc.Sequence) or has_attribute(thing, "set_epoch") or derives_from(thing, "grain"):
        return True
    batches = attribute_of(thing, "batch_sampler")
    # With a batch sampler of the user's, the loader's own `sampler` is a SequentialSampler that decides nothing.
    if not is_loader(thing) or (batches is not None and type(batches).__name__ != "BatchSampler"):
        return False
    return type(attribute_of(thing if batches is None else batches, "sampler")).__name__ == "SequentialSampler"


def is_own_loader(thing: Any) -> bool:
    """Whether `thing` is a loader of this package."""
    return any(derives_from(without_bar(thing), "libai_data", name) for name in _OWN_LOADERS)


def refuse_part_of_rank(thing: Any) -> None:
    """Refuse a torch or OneFlow loader, or a dataset of Hugging Face, that reads only the part of one rank."""
    thing = without_bar(thing)
    samplers = attribute_of(thing, "sampler"), attribute_of(attribute_of(thing, "batch_sampler"), "sampler")
    parts = [attribute_of(each, "num_replicas") for each in samplers]
    parts.append(attribute_of(attribute_of(thing, "_distributed"), "world_size"))
    for count in parts:
        if isinstance(count, int) and count > 1:
            raise ConfigError(
                f"{type(thing).__name__} reads one of {count} parts, that of a rank, but the loader splits the rows "
                "over the ranks, so the other parts would be lost. Remove the DistributedSampler or "
                "split_dataset_by_node; or pass a function with the parameters shard and num_shards, which splits the "
                "rows itself"
            )


def without_bar(thing: Any) -> Any:
    """What a progress bar of tqdm, or the wrapper of Lightning's Fabric, goes through; anything else unchanged."""
    while True:
        if derives_from(thing, "tqdm") and attribute_of(thing, "iterable") is not None:
            thing = thing.iterable
        elif derives_from(thing, _LIGHTNING, "_FabricDataLoader"):
            thing = thing._dataloader
        else:
            return thing


def loader_within(iterator: Any) -> Any:
    """The loader of batches that a generator, a progress bar, or an iterator such as `enumerate`, reads; or None."""
    for thing in _reached(iterator, _read_by):
        if yields_batches(thing) or is_own_loader(thing) or derives_from(thing, "libai_data", "Pass"):
            return thing
    return None


def places_within(iterator: Any) -> list[Any]:
    """The open files and iterators that an iterator reads, or that its generator names as variables or attributes."""
    return [thing for thing in _reached(iterator, _named_by) if thing is not iterator and _keeps_place(thing)]


def _keeps_place(thing: Any) -> bool:
    if isinstance(thing, IOBase):
        return not thing.closed and thing.readable()
    return has_attribute(type(thing), "__next__") and not isinstance(thing, (itertools.count, itertools.repeat))


def _reached(thing: Any, within: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """`thing`, what is `within` it, what is within that, and so on; at most `_MOST_OBJECTS` objects."""
    waiting, seen = [thing], 0
    while waiting and seen < _MOST_OBJECTS:
        thing, seen = waiting.pop(), seen + 1
        yield thing
        waiting.extend(within(thing))


def _read_by(thing: Any) -> Iterable[Any]:
    if isinstance(thing, GeneratorType):
        return () if thing.gi_frame is None else thing.gi_frame.f_locals.values()
    if isinstance(thing, (tuple, enumerate, zip, map, filter, type(iter(())))) or type(thing) in _ITERTOOLS:
        return gc.get_referents(thing)
    if derives_from(thing, _BARS):
        return attribute_of(thing, "__dict__", {}).values()
    return ()


def _named_by(thing: Any) -> Iterable[Any]:
    """Also the global variables and attributes that the code of a generator names, and all attributes of iterators."""
    yield from _read_by(thing)
    if not isinstance(thing, GeneratorType):
        if has_attribute(type(thing), "__next__") and not isinstance(thing, IOBase):
            yield from (each for each in gc.get_referents(thing) if not isinstance(each, (dict, type)))
            yield from attribute_of(thing, "__dict__", {}).values()
    elif (frame := thing.gi_frame) is not None:
        for variables in (frame.f_globals, *(attribute_of(each, "__dict__", {}) for each in frame.f_locals.values())):
            yield from (variables[name] for name in thing.gi_code.co_names if name in variables)


def is_map_style(thing: Any) -> bool:
    """Whether `thing` returns samples by index, and has a length."""
    return has_attribute(thing, "__len__") and has_index(thing)


def has_index(thing: Any) -> bool:
    """Whether `thing` returns samples by index: it has `[index]`, and is not a stream."""
    if not has_attribute(thing, "__getitem__") or isinstance(thing, (str, bytes, dict)):
        return False
    is_stream = derives_from(thing, _DATA, "IterableDataset")
    return not is_stream and not yields_batches(thing)


def without_node_splitting(thing: Any) -> Any:
    """A WebDataset pipeline without the stage that refuses several ranks, since here the mesh shards the samples."""
    if not derives_from(thing, "webdataset") or not isinstance(getattr(thing, "pipeline", None), list):
        return thing
    names = [getattr(stage, "__name__", "") for stage in thing.pipeline]
    if "split_by_node" in names:
        raise ConfigError(
            "this WebDataset pipeline has split_by_node, but the loader shards over the mesh; remove nodesplitter"
        )
    whole = copy.copy(thing)
    whole.pipeline = [stage for stage, name in zip(thing.pipeline, names) if name != "single_node_only"]
    return whole


def derives_from(thing: Any, package: str | tuple[str, ...], name: str = "") -> bool:
    """Whether the class of `thing`, or a base class, is of this package, or one of these, and has this name if a name
    is given."""
    packages = tuple(f"{each}." for each in ((package,) if isinstance(package, str) else package))
    return any(
        f"{base.__module__}.".startswith(packages) and name in ("", base.__name__) for base in type(thing).__mro__
    )
