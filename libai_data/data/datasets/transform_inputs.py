"""The samples that a stream transform is given: each as it is, or another one in the place of one that fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from libai_data.data.random.global_generators import GlobalDraws
from libai_data.data.random.sample_random import reading_inputs
from libai_data.data.random.substitute import SUBSTITUTES, substitute_index
from libai_data.errors import SampleError, failed_reading

LEFT_OUT = object()
"""What a sample that is not kept is read as."""


class Replacement(NamedTuple):
    """The index of a sample that was read in the place of one that failed, and why."""

    chosen: int
    reason: str
    kind: str


class TransformInputs:
    """Reads samples; whoever reads a sample, it draws the same.

    Samples for which one of the functions `keeps` is false are left out. `kept`, bool [samples], says which samples may
    replace another one; None for all.
    """

    def __init__(self, dataset: Any, keeps: Sequence[Callable[[Any], bool]], kept: np.ndarray | None) -> None:
        self._dataset, self._keeps, self._kept = dataset, keeps, kept
        self._draws = GlobalDraws(type(dataset).__name__)
        self._known_bad: frozenset[int] | None = None

    def replace_failing(self, known_bad: frozenset[int]) -> None:
        """Read another sample in the place of one that fails from now on, the same one whoever reads it."""
        self._known_bad = known_bad

    def read(self, seed: int, epoch: int, index: int) -> tuple[Any, Replacement | None]:
        """A sample, or `LEFT_OUT`, and whether it takes the place of one that fails."""
        if self._known_bad is None:
            return self._read_one(seed, epoch, index), None
        reason, kind = "listed in the quarantine file", ""
        if index not in self._known_bad:
            try:
                return self._read_one(seed, epoch, index), None
            except SampleError as error:
                reason, kind = str(error), type(error.__cause__ or error).__name__
        candidates = None if self._kept is None else np.flatnonzero(self._kept)
        size = len(self._dataset) if candidates is None else len(candidates)
        for attempt in range(SUBSTITUTES):
            chosen = substitute_index(seed, epoch, index, attempt, size)
            chosen = chosen if candidates is None else int(candidates[chosen])
            if chosen == index or chosen in self._known_bad:
                continue
            try:
                return self._read_one(seed, epoch, chosen), Replacement(chosen, reason, kind)
            except SampleError:
                continue
        raise SampleError(f"{reason}; {SUBSTITUTES} samples tried in its place failed as well")

    def _read_one(self, seed: int, epoch: int, index: int) -> Any:
        key = seed, epoch, index

        def read() -> Any:
            with reading_inputs((key,)):
                sample = self._dataset[index]
                return sample if all(keep(sample) for keep in self._keeps) else LEFT_OUT

        try:
            return self._draws.around(read, key)
        except BaseException as error:
            raise failed_reading(f"sample {index} of {type(self._dataset).__name__}", error) from error
