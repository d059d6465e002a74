"""What happens to samples that cannot be read: they end the run, or others take their place."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from libai_data.errors import ConfigError, nearest
from libai_data.mixing import combine64

logger = logging.getLogger(__name__)

POLICIES = ("raise", "skip", "quarantine")
SUBSTITUTES = 100
"""How many other samples are tried in the place of one that fails."""


@dataclass(frozen=True)
class ErrorPolicy:
    """What to do about a sample that fails.

    Args:
        on_error: "raise" ends the run; "skip" reads another sample in its place, the same one on every layout;
            "quarantine" also writes it to `quarantine_file`.
        quarantine_file: JSON lines of {"index", "error"}; the samples it lists at the start are skipped without being
            read.

    Raises:
        ConfigError: An unknown policy, or "quarantine" without a file.
    """

    on_error: str = "raise"
    quarantine_file: str | None = None
    known_bad: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.on_error not in POLICIES:
            raise ConfigError(f"on_error is {self.on_error!r}; known are {POLICIES}.{nearest(self.on_error, POLICIES)}")
        if self.on_error == "quarantine" and not self.quarantine_file:
            raise ConfigError("on_error='quarantine' needs quarantine_file, the file to write failing samples to")
        if self.quarantine_file and not self.known_bad:
            object.__setattr__(self, "known_bad", read_quarantine(Path(self.quarantine_file)))

    @property
    def substitutes(self) -> bool:
        """Whether another sample takes the place of one that fails."""
        return self.on_error != "raise"


@dataclass(frozen=True)
class SkippedSample:
    """A sample that failed, and the one that was read in its place."""

    epoch: int
    index: int
    substitute: int
    error: str


def substitute_index(seed: int, epoch: int, index: int, attempt: int, size: int) -> int:
    """The sample to try in the place of one that fails: the same for whoever reads it."""
    return combine64(seed, epoch, index, attempt) % size


def read_quarantine(path: Path) -> frozenset[int]:
    """The indices that a quarantine file lists; none if it is not there yet.

    Raises:
        ConfigError: A line is malformed; its number is named.
    """
    if not path.exists():
        return frozenset()
    indices = set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            indices.add(int(json.loads(line)["index"]))
        except (ValueError, KeyError, TypeError) as error:
            expected = '{"index": ..., "error": ...}'
            raise ConfigError(f"{path}, line {number}: expected {expected}, found {line!r}") from error
    return frozenset(indices)


class FailureLog:
    """Counts, logs and records the samples that were skipped; lives in the trainer's process.

    Args:
        policy: the loader's.
        dataset_name: named in the log.
    """

    def __init__(self, policy: ErrorPolicy, dataset_name: str) -> None:
        self._policy = policy
        self._dataset_name = dataset_name
        self._recorded = set(policy.known_bad)
        self.skipped = 0

    def add(self, samples: Iterable[SkippedSample]) -> None:
        """Take note of skipped samples."""
        for sample in samples:
            self.skipped += 1
            if sample.index in self._recorded:
                continue
            self._recorded.add(sample.index)
            logger.warning(
                "Skipped sample %d of %s (epoch %d), took sample %d instead: %s",
                sample.index,
                self._dataset_name,
                sample.epoch,
                sample.substitute,
                sample.error,
            )
            if self._policy.on_error == "quarantine":
                self._record(sample)

    def _record(self, sample: SkippedSample) -> None:
        line = json.dumps({"index": sample.index, "error": sample.error}) + "\n"
        path = Path(str(self._policy.quarantine_file))
        path.parent.mkdir(parents=True, exist_ok=True)
        # One write in append mode: lines of several ranks that share the file do not mix.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
