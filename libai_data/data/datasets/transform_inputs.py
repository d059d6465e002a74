"""Reads the input samples of a filter or packer; a sample that fails can be replaced by another sample."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Callable

import numpy as np

from libai_data.data.random.global_generators import GlobalDraws
from libai_data.data.random.sample_random import reading_inputs
from libai_data.data.random.substitute import Replacement, read_or_substitute
from libai_data.errors import failed_reading

LEFT_OUT = object()
"""This value is returned for a sample that is not kept."""


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
        read = partial(self._read_one, seed, epoch)
        if self._known_bad is None:
            return read(index), None
        return read_or_substitute(read, (seed, epoch, index), self._known_bad, self._candidates)

    def _candidates(self) -> Sequence[int]:
        return range(len(self._dataset)) if self._kept is None else np.flatnonzero(self._kept)  # type: ignore[return-value]

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
