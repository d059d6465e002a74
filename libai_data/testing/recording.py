"""Runs the loaders of all ranks of a job in one process, step by step, and records the indices that they yield."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np

from libai_data.data.attributes import attribute_of, call_if_there
from libai_data.errors import ConfigError
from libai_data.structures import Instance, origin_of

Step = list[list[int]]
"""For each rank, the indices in its batch, without padding."""

_END = object()
_MOST_STEPS_PER_SAMPLE = 4


@dataclass
class Pass:
    """The record of one pass over the loaders."""

    steps: list[Step] = field(default_factory=list)  # of all ranks; a rank that has ended has no indices
    # For each step, the states of all ranks after the step; None if a loader has no state.
    states: list[list[Any] | None] = field(default_factory=list)
    ended: list[int | None] = field(default_factory=list)  # steps of each rank; None until the rank has ended


@dataclass(frozen=True)
class Factory:
    """Makes the loaders of a job. The fields are the arguments of `check_conformance`."""

    make_loader: Callable[..., Iterable[Any]]
    samples: int
    endless: bool
    indices_of: Callable[[Any], Sequence[int]] | None

    @property
    def takes_workers(self) -> bool:
        """Whether `make_loader` has a parameter for the number of workers."""
        return "workers" in inspect.signature(self.make_loader).parameters

    def start(self, world: int, states: list[Any] | None = None, workers: int | None = None) -> Job:
        """Make the loaders of all ranks, at the start of the stream or at each rank's state."""
        more = {} if workers is None else {"workers": workers}
        given = [None] * world if states is None else [copy.deepcopy(state) for state in states]
        return Job(self, [self.make_loader(rank, world, given[rank], **more) for rank in range(world)])


class Job:
    """The loaders of all ranks."""

    def __init__(self, factory: Factory, loaders: list[Any]) -> None:
        self._factory = factory
        self._loaders = loaders
        self._running: list[Iterator[Any]] | None = None

    @property
    def has_states(self) -> bool:
        return all(callable(attribute_of(loader, "state_dict")) for loader in self._loaders)

    def play(self, samples: int | None = None) -> Pass:
        """Read the rest of a pass, rank by rank within each step; of an endless one, at least so many `samples`."""
        iterators = self._running or [iter(loader) for loader in self._loaders]
        self._running = iterators if self._factory.endless else None
        done = Pass(ended=[None] * len(iterators))
        taken = 0
        while samples is None or taken < samples:
            step: Step = []
            for rank, iterator in enumerate(iterators):
                batch = next(iterator, _END) if done.ended[rank] is None else _END
                if batch is _END and done.ended[rank] is None:
                    done.ended[rank] = len(done.steps)
                step.append([] if batch is _END else self._read(batch, rank))
                del batch
            if None not in done.ended:
                break
            done.steps.append(step)
            states = [copy.deepcopy(loader.state_dict()) for loader in self._loaders] if self.has_states else None
            done.states.append(states)
            taken += sum(map(len, step))
            if len(done.steps) > _MOST_STEPS_PER_SAMPLE * self._factory.samples + 4:
                raise ConfigError(
                    f"after {len(done.steps)} steps over {self._factory.samples} samples the pass has not ended; if "
                    "the stream is endless, set endless=True"
                )
        return done

    def close(self) -> None:
        for loader in self._loaders:
            call_if_there(loader, "close")

    def _read(self, batch: Any, rank: int) -> list[int]:
        if self._factory.indices_of is not None:
            indices = np.asarray(self._factory.indices_of(batch))
        elif isinstance(batch, Instance):
            indices = _counting_rows(batch, rank)
        else:
            indices = np.asarray(batch)
        if indices.dtype.kind not in "iu" and indices.size:
            raise ConfigError(
                f"a batch of type {type(batch).__name__} has no indices; pass indices_of, a function from a batch to "
                "the index of each of its rows"
            )
        return [index for index in indices.reshape(-1).tolist() if index >= 0]


def _counting_rows(batch: Instance, rank: int) -> np.ndarray:
    """The indices of a batch of this package, without padding; `valid` counts rows of the whole global batch."""
    info, rows, *_ = origin_of(batch)
    if rows is None or info is None:
        raise ConfigError("this Instance has no indices of its samples; pass indices_of")
    return rows.indices[: max(0, info.valid - rank * len(rows.indices))]
