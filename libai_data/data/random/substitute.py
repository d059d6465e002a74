"""Reads another sample instead of one that cannot be read; each process that reads the sample chooses the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, NamedTuple, TypeVar

from libai_data.data.random.hashing import combine64
from libai_data.errors import SampleError, SchemaError

Result = TypeVar("Result")

SUBSTITUTES = 100
"""The number of other samples that are tried instead of a sample that fails."""


class Replacement(NamedTuple):
    """The index of a sample that replaced a failed sample, the message of the failure, and its class."""

    chosen: int
    reason: str
    kind: str


def failure_of(error: SampleError) -> tuple[str, str]:
    """The message of a failure, and its class. A mismatch of schemas is raised, as no substitute may hide it."""
    if isinstance(error, SchemaError):
        raise error
    return str(error), type(error.__cause__ or error).__name__


def substitute_index(seed: int, epoch: int, index: int, attempt: int, size: int) -> int:
    """The index of the sample to try instead of one that fails; the same in each process that reads it."""
    return combine64(seed, epoch, index, attempt) % size


def read_or_substitute(
    read: Callable[[int], Result],
    key: tuple[int, int, int],
    known_bad: frozenset[int],
    candidates: Callable[[], Sequence[int]],
    failure: tuple[str, str] | None = None,
) -> tuple[Result, Replacement | None]:
    """Read the sample of a key (seed, epoch, index). If it fails, is in `known_bad`, or its `failure` is known, read
    the first substitute that can be read, of the indices `candidates()`."""
    index = key[2]
    if failure is None and index in known_bad:
        failure = "listed in the quarantine file", ""
    if failure is None:
        try:
            return read(index), None
        except SampleError as error:
            failure = failure_of(error)
    indices = candidates()
    for attempt in range(SUBSTITUTES):
        chosen = int(indices[substitute_index(*key, attempt, len(indices))])
        if chosen == index or chosen in known_bad:
            continue
        try:
            return read(chosen), Replacement(chosen, *failure)
        except SampleError as error:
            failure_of(error)
    raise SampleError(f"{failure[0]}; {SUBSTITUTES} samples that were read instead failed as well")
