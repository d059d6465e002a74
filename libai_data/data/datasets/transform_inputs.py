"""Reads the input samples of a filter or packer; a sample that fails can be replaced by another sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from libai_data.data.random.global_generators import GlobalDraws
from libai_data.data.random.sample_random import reading_inputs
from libai_data.data.random.substitute import SUBSTITUTES, substitute_index
from libai_data.errors import SampleError, failed_reading

LEFT_OUT = object()
"""This value is returned for a sample that is not kept."""


class Replacement(NamedTuple):
    """The index of a sample that replaced a failed sample, the message of the failure, and its class."""

    chosen: int
    reason: str
    kind: str


class TransformInputs:
    """Reads samples; the random draws of a sample do not depend on the process that reads it.

    If one of the functions `keeps` returns False for a sample, the sample is left out. `kept`, bool [samples], marks
    the samples that may replace another sample; None for all.
    """

    def __init__(self, dataset: Any, keeps: Sequence[Callable[[Any], bool]], kept: np.ndarray | None) -> None:
        self._dataset, self._keeps, self._kept = dataset, keeps, kept
        self._draws = GlobalDraws(type(dataset).__name__)
        self._known_bad: frozenset[int] | None = None

    def replace_failing(self, known_bad: frozenset[int]) -> None:
        """From now on, replace samples that fail or are in `known_bad`; all processes choose the same replacements."""
        self._known_bad = known_bad

    def read(self, seed: int, epoch: int, index: int) -> tuple[Any, Replacement | None]:
        """A sample or `LEFT_OUT`; and a `Replacement` if the sample replaces a failed sample, else None. A SampleError
        if the sample cannot be read, and is not replaced, or all its replacements failed."""
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
        raise SampleError(f"{reason}; {SUBSTITUTES} samples that were read instead failed as well")

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
