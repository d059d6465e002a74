"""The source of a loader: how its epochs are opened, whether it yields batches, and how its state is saved."""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections import abc
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Callable

import numpy as np

from libai_data.data.attributes import attribute_of, has_attribute
from libai_data.data.datasets.combine import length_of, refuse_class
from libai_data.data.random.global_generators import warn_once
from libai_data.data.random.permutation import permuted
from libai_data.data.samplers.batch_runs import runs_of_sampler
from libai_data.errors import CheckpointError, ConfigError
from libai_data.iterables.failed_rows import Skipping
from libai_data.iterables.kinds import (
    derives_from,
    is_lightnings_combined_loader,
    is_loader,
    is_own_loader,
    knows_its_rounds,
    loader_within,
    places_within,
    refuse_part_of_rank,
    without_bar,
    without_node_splitting,
    yields_batches,
)
from libai_data.iterables.plain_state import decoded, encoded
from libai_data.iterables.prefetcher import Flag
from libai_data.iterables.shared_use import Alone, Opened, SaveState, uses_of
from libai_data.loader.worker_info import get_worker_info

Arrays = tuple[np.ndarray, ...]


class Source:
    """An iterable, or a function that returns one, opened once for each epoch.

    Args:
        thing: see `from_iterable`; an iterable must allow another iteration.
        batches: whether `thing` yields batches instead of samples; with None, its class decides.
        skips: yield a `FailedRow` for each error of the iterator.
    """

    closed = Flag()
    """Is set when another thread has closed the pass that reads."""

    def __init__(self, thing: Any, batches: bool | None = None, skips: bool = False) -> None:
        self._skips = skips
        self.name = attribute_of(thing, "__qualname__", type(without_bar(thing)).__name__)
        if is_own_loader(thing):
            raise ConfigError(f"a {self.name} of libai_data is a loader already; use it as it is")
        refuse_part_of_rank(thing)
        self._is_told = batches is not None
        self.batches = yields_batches(thing) if batches is None else batches
        if not self._is_told and not self.batches and (inner := loader_within(thing)) is not None:
            raise ConfigError(
                f"{self.name} goes through a {type(inner).__name__}, which yields batches, so it is not known what its "
                "items are. Give the loader itself; or set batches=True, or batches=False if each item is a sample"
            )
        self.batch_runs = runs_of_sampler(thing) if self.batches and is_loader(thing) else []
        """The batches of an epoch, if the last one may be short, and the loader's length is known; else empty."""
        thing = (
            PipelineRounds(thing) if derives_from(thing, "nvidia.dali", "Pipeline") else without_node_splitting(thing)
        )
        refuse_class(thing)
        self._thing = thing
        self._is_factory = callable(thing) and not has_attribute(thing, "__iter__")
        if not self._is_factory and not has_attribute(thing, "__iter__") and not has_attribute(thing, "__getitem__"):
            raise ConfigError(
                f"a loader cannot be made of {thing!r:.100} ({type(thing).__name__}); pass an iterable, a generator "
                "function or a dataset"
            )
        if isinstance(thing, (str, bytes, abc.Mapping)):
            raise ConfigError(
                f"a {type(thing).__name__} is not an iterable of samples; pass the dataset itself, such as one split"
            )
        accepted = _keywords(thing) if self._is_factory else ()
        self.takes_shard = "shard" in accepted and "num_shards" in accepted
        for name, other in (("shard", "num_shards"), ("num_shards", "shard")):
            if name in accepted and other not in accepted:
                raise ConfigError(
                    f"{self.name} has the parameter {name} but not {other}; give it both, and the loader passes them. "
                    f"If {name} is not for the loader, bind it: functools.partial({self.name}, {name}=...)"
                )
        self._takes_epoch = "epoch" in accepted
        self.knows_epoch = self._takes_epoch or has_attribute(thing, "set_epoch")
        """Whether the epoch may decide the rows, so that an epoch may have none."""
        self._rounds_begun = 0
        self._last_iterator: Callable[[], Any] = lambda: None
        self._uses = uses_of(thing)
        self.first_length: int | None = None
        """Length of an iterable with a state before its first epoch, if it has a length; else None."""
        if not self._is_factory and _keeps_state(thing):
            with suppress(Exception):  # Some iterables know their length only later, or never.
                self.first_length = self.length()

    def length(self) -> int:
        """The number of items of an epoch, by the iterable's `len`; a TypeError if it has none."""
        if self._is_factory or not has_attribute(self._thing, "__len__"):
            raise TypeError(
                f"the number of batches is unknown: {self.name} has no len(); iterate without len(loader), or give it "
                "a __len__"
            )
        return len(self._thing)

    def rounds_to_replay(self, epoch: int) -> int:
        """How many earlier epochs must be read so that this epoch is the same as in an uninterrupted run.

        A function is called again for each epoch. An epoch of an iterable without `set_epoch`, such as a torch
        DataLoader that shuffles, may depend on the number of epochs before.
        """
        if self._is_factory or knows_its_rounds(self._thing):
            return 0
        return max(0, epoch - self._rounds_begun)

    def reopens(self, epoch: int) -> bool:
        """Whether this epoch can be read from its beginning, without a state and without the epochs before."""
        # An iterable that keeps its place itself may be in the middle of an epoch; its iterators begin anew.
        return not self.rounds_to_replay(sys.maxsize if _keeps_state(self._thing) else epoch)

    def open(self, epoch: int, shard: int, num_shards: int, state: str | None = None) -> Opened:
        """Begin an epoch at a `state` that `SaveState` returned; only a function with `shard` uses `shard`.

        Raises ConfigError if the iterable cannot begin this epoch, and CheckpointError if it cannot restore the state.
        """
        alone = Alone()
        with alone.running():
            alone.use_again(self._uses, self.name)
            rows, save = self._opened(self._made(epoch, shard, num_shards, alone), epoch, state)
            alone.use_places(self._uses, self.name, places_within(rows))
        return alone.reading(rows, save)

    def _opened(self, thing: Any, epoch: int, state: str | None) -> Opened:
        inner = loader_within(thing) if not (self._is_told or self.batches) else None
        if inner is not None and (inner is not thing or yields_batches(thing)):
            through = "" if inner is thing else f"goes through a {type(inner).__name__}, which "
            raise ConfigError(
                f"{self.name} returned a {type(thing).__name__}, which {through}yields batches, but what a function "
                "yields counts as samples; set batches=True, or batches=False if each of its items is a sample"
            )
        self._rounds_begun = max(self._rounds_begun, epoch + 1)
        keeps_state = _keeps_state(thing)
        if keeps_state and has_attribute(thing, "set_epoch"):
            self._begin_anew(thing)
        if has_attribute(thing, "set_epoch"):
            thing.set_epoch(epoch)
        if keeps_state:
            if state is not None:
                thing.load_state_dict(decoded(state))
            return self._adapted(self._recording_the_end(thing, state)), self._saver(thing.state_dict)
        iterator = iter(thing)
        # A torch DataLoader with persistent workers resets its iterator and returns it again.
        if iterator is self._last_iterator() and not (is_loader(thing) or has_attribute(thing, "reset")):
            raise self.goes_once()
        self._last_iterator = _reference(iterator)
        for save, load in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
            if has_attribute(iterator, save) and has_attribute(iterator, load):
                if state is not None:
                    getattr(iterator, load)(decoded(state))
                return self._adapted(self._with_skips(iterator)), self._saver(getattr(iterator, save))
        if state is not None:
            raise CheckpointError(
                f"the data state has a state of {self.name}, but {self.name} has no load_state_dict (or set_state) "
                "any more. Use the version that saved it"
            )
        return self._adapted(self._with_skips(iterator)), None

    def close(self) -> None:
        """End the processes and threads that read."""

    def _begin_anew(self, thing: Any) -> None:
        """Reset an iterable whose epoch was interrupted, or begun at a state: many would begin in the middle again."""
        if thing is not self._thing:
            return
        if self._uses.fresh_state is None:
            self._uses.fresh_state = _state_of(thing)
        elif self._uses.is_broken_off:
            thing.load_state_dict(decoded(self._uses.fresh_state))

    def _recording_the_end(self, thing: Any, state: str | None) -> Iterator[Any]:
        """Iterate over an iterable with a state, and note whether it reaches its end."""
        must_restart = (
            thing is self._thing
            and self._uses.is_broken_off
            and state is None
            and not has_attribute(thing, "set_epoch")
        )
        state_before = _state_of(thing) if must_restart else None
        iterator = iter(thing)
        if state_before is not None and state_before == _state_of(thing):
            raise ConfigError(
                f"{self.name} was interrupted in the middle of an epoch. If it is iterated again, it continues there, "
                "after the samples that were read ahead. Give it set_epoch(epoch), let iter() start a new epoch, or "
                "read each epoch to its end"
            )

        def to_the_end() -> Iterator[Any]:
            self._uses.is_broken_off = True
            yield from self._with_skips(iterator)
            self._uses.is_broken_off = state is not None and has_attribute(thing, "set_epoch")

        return to_the_end()

    def goes_once(self) -> ConfigError:
        """The error for an iterable that has only one epoch."""
        return ConfigError(
            f"{self.name} is an iterator, or contains one, which can be iterated only once. Pass the function that "
            "makes it, so that each epoch, and a resumed training, gets a new one"
        )

    def _saver(self, get: Callable[[], Any]) -> SaveState | None:
        """The function that saves the state. None if a checkpoint cannot store the state; a resume counts samples."""
        try:
            encoded(get())
        except CheckpointError as error:
            warn_once(f"The state of {self.name} is not used; a resume counts its samples instead: {error}")
            return None
        return lambda: encoded(get())

    def _made(self, epoch: int, shard: int, num_shards: int, alone: Alone) -> Any:
        if self._is_factory:
            arguments: dict[str, Any] = {"epoch": epoch} if self._takes_epoch else {}
            if self.takes_shard:
                arguments.update(shard=shard, num_shards=num_shards)
            return self._thing(**arguments)
        must_reset = has_attribute(self._thing, "__next__") and self._uses.has_begun
        if must_reset and not has_attribute(self._thing, "reset"):
            raise self.goes_once()
        self._uses.has_begun = True
        if type(self._thing).__module__.startswith("datasets."):
            copied = copy.copy(self._thing)
            # A copy shares its attributes. Changes of the state in this epoch must leave the original as it was.
            copied.__dict__ = {**vars(copied)}
            return copied
        if _is_for_one(self._thing):
            alone.use(self._thing, self.name)
        if must_reset:
            self._thing.reset()
        return self._thing

    def _with_skips(self, iterator: Iterator[Any]) -> Iterator[Any]:
        return Skipping(iterator, self.name) if self._skips else iterator

    def _adapted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        if derives_from(self._thing, "nvidia.dali"):
            # DALI's iterators yield a list with the outputs of each pipeline.
            return (outputs for each in iterator for outputs in (each if isinstance(each, (list, tuple)) else [each]))
        if derives_from(self._thing, "ffcv"):
            # FFCV overwrites an older batch, which may still be in use.
            return map(copy.deepcopy, iterator)
        if is_lightnings_combined_loader(self._thing):
            return map(_batch_of_lightning, iterator)
        return iterator


def _batch_of_lightning(item: Any) -> Any:
    """The batch of an item of Lightning's CombinedLoader: since version 2, the numbers of batch and loader follow."""
    return item[0] if isinstance(item, tuple) and [*map(type, item[1:])] == [int, int] else item


def _is_for_one(thing: Any) -> bool:
    """Whether two loops that iterate over `thing` at the same time would get other items than alone."""
    begins_anew = attribute_of(thing, "persistent_workers", False)
    return (
        bool(begins_anew)
        or has_attribute(thing, "set_epoch")
        or has_attribute(thing, "__next__")
        or _keeps_state(thing)
    )


def _state_of(thing: Any) -> str | None:
    """The state of an iterable; None if a checkpoint cannot store it."""
    try:
        return encoded(thing.state_dict())
    except CheckpointError:
        return None


def _reference(iterator: Any) -> Callable[[], Any]:
    """A weak reference to an iterator, or a function that returns it if it supports no weak references."""
    try:
        return weakref.ref(iterator)
    except TypeError:
        return lambda: iterator


def _keywords(function: Any) -> Iterable[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    bound = getattr(function, "keywords", {})  # those that a functools.partial binds
    by_name = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return [name for name in by_name if name not in bound]


def _keeps_state(thing: Any) -> bool:
    """Whether an iterable can be restored exactly from its state."""
    if not (has_attribute(thing, "state_dict") and has_attribute(thing, "load_state_dict")):
        return False
    if is_lightnings_combined_loader(thing):  # Its state is empty.
        return False
    # The state of a Hugging Face stream omits the samples in its shuffle buffers, so a resume counts samples instead.
    waiting = [getattr(thing, "_ex_iterable", None)]
    while waiting:
        examples = waiting.pop()
        name = type(examples).__name__
        # Streams that were concatenated cannot load the state of a shard, which has only some of them.
        if "BufferShuffled" in name or ("VerticallyConcatenated" in name and get_worker_info() is not None):
            return False
        # Streams that were joined or interleaved have several sources.
        sources = getattr(examples, "ex_iterables", None) or [getattr(examples, "ex_iterable", None)]
        waiting.extend(source for source in sources if source is not None)
    return True


class IndexedBatches:
    """Iterates over `dataset[0]` to `dataset[len(dataset) - 1]`, each of which is a batch.

    With `shuffle`, each epoch has another order. If the stream is read in shards, each shard has every
    `num_shards`-th batch.
    """

    def __init__(self, dataset: Any, shuffle: bool, seed: int) -> None:
        self.dataset, self._shuffle, self._seed = dataset, shuffle, seed
        self.__qualname__ = type(dataset).__name__  # for error messages
        self._epoch = 0

    def __len__(self) -> int:
        return length_of(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        size, info = length_of(self.dataset), get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for place in range(first, size, step):
            index = int(permuted(size, self._seed, self._epoch, np.array([place]))[0]) if self._shuffle else place
            yield self.dataset[index]


class PipelineRounds:
    """Iterates over one epoch of a DALI pipeline with outputs on the CPU; yields batches, tuples of arrays [rows, ...].

    A batch of a pipeline with a reader may have rows of two epochs. This class cuts such a batch: its last rows begin
    the next epoch. A pipeline whose external source ends is reset.
    """

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._left: list[Arrays] = []

    def __iter__(self) -> Iterator[Arrays]:
        self._pipeline.build()
        sizes = self._pipeline.epoch_size().values()
        left = max(sizes) if sizes else None
        while left is None or left > 0:
            arrays = self._left.pop() if self._left else self._run()
            if not arrays:
                self._pipeline.reset()
                return
            rows = len(arrays[0])
            if left is not None and rows > left:
                self._left.append(tuple(array[left:] for array in arrays))
                rows = left
            yield tuple(array[:rows] for array in arrays)
            left = None if left is None else left - rows

    def _run(self) -> Arrays:
        """Copies of the outputs of the next run; an empty tuple at the end."""
        try:
            outputs = self._pipeline.run()
        except StopIteration:
            return ()
        return tuple(np.array(output.as_array()) for output in outputs)
