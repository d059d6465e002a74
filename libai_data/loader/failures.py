"""Samples that cannot be read: they end the run, or other samples replace them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from libai_data.atomic_files import AppendFile
from libai_data.data.random.global_generators import warn_once
from libai_data.data.random.hashing import combine64
from libai_data.errors import ConfigError, SampleError
from libai_data.errors.argument_rules import OUTPUT_FILE, check, one_of, or_none, real

logger = logging.getLogger(__name__)

POLICIES = ("raise", "skip", "quarantine")
SAMPLES_BEFORE_BUDGET = 1000
"""The budget of replaced samples applies once this many samples were delivered."""

_LONGEST_EXAMPLE = 300

_RULES = {
    "on_error": one_of(*POLICIES),
    "quarantine_file": or_none(OUTPUT_FILE),
    "replacement_budget": real(0, 1, "a share; 0.01 is 1 %"),
}


@dataclass(frozen=True)
class ErrorPolicy:
    """What happens if a sample fails.

    Args:
        on_error: "raise" ends the run; "skip" reads another sample in its place, the same one on every layout;
            "quarantine" also writes it to `quarantine_file`.
        quarantine_file: JSON lines of {"index", "error"}; the samples it lists at the start are skipped without being
            read.
        replacement_budget: share of the samples that may be replaced, once 1,000 have been delivered; samples that
            `quarantine_file` lists at the start do not count.
        known_bad: indices of samples that are skipped without being read; by default those of `quarantine_file`.

    Raises:
        ConfigError: An argument is out of range, or `quarantine_file` does not fit `on_error` or is malformed.
    """

    on_error: str = "raise"
    quarantine_file: str | None = None
    replacement_budget: float = 0.01
    known_bad: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        check(_RULES, **{name: getattr(self, name) for name in _RULES})
        if self.on_error == "quarantine" and not self.quarantine_file:
            raise ConfigError("on_error='quarantine' needs quarantine_file, the file to write failing samples to")
        if self.quarantine_file and self.on_error == "raise":
            raise ConfigError("quarantine_file is given, but on_error is 'raise'; set on_error='quarantine' or 'skip'")
        if self.quarantine_file and not self.known_bad:
            object.__setattr__(self, "known_bad", read_quarantine(Path(self.quarantine_file)))

    @property
    def substitutes(self) -> bool:
        """Whether another sample replaces a sample that fails."""
        return self.on_error != "raise"


@dataclass(frozen=True)
class SkippedSample:
    """A sample that failed, its substitute, and the kind of failure; "" if the quarantine file listed the sample.

    In a stream, the index is the number of good rows before the sample, and there is no substitute (None).
    """

    epoch: int
    index: int
    substitute: int | None
    error: str
    kind: str = ""


def read_quarantine(path: Path) -> frozenset[int]:
    """The indices that a quarantine file lists; none if there is no file. A ConfigError names a malformed line."""
    if not path.exists():
        return frozenset()
    if not path.is_file():  # Opening a pipe would wait for a writer.
        raise ConfigError(f"quarantine_file {path} is a device, a pipe or a socket; give the path of a file")
    indices = set()
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="backslashreplace").splitlines(), start=1):
        try:
            indices.add(int(json.loads(line)["index"]))
        except (ValueError, KeyError, TypeError) as error:
            expected = '{"index": ..., "error": ...}'
            raise ConfigError(f"{path}, line {number}: expected {expected}, found {line!r}") from error
    return frozenset(indices)


class FailureLog:
    """Counts, logs and records the samples that were skipped; lives in the trainer's process.

    `planned` gives, for an epoch and an index, the substitute that was read when the stream was planned, if any.
    """

    def __init__(
        self, policy: ErrorPolicy, dataset_name: str, planned: Callable[[int, int], int | None] | None = None
    ) -> None:
        self._policy = policy
        self._planned = planned
        self._dataset_name = dataset_name
        self._recorded = set(policy.known_bad)
        self.skipped = 0  # number of samples
        # Of the samples, and of their substitutes, in any order; ranks that read the same samples compare it.
        self.digest = 0
        self._delivered = 0
        self._kinds: Counter[str] = Counter()
        self._examples: dict[str, SkippedSample] = {}

    def deliver(self, read: int, samples: Sequence[SkippedSample]) -> SampleError | None:
        """Note a batch of `read` samples, of which `samples` were skipped; returns the error that ends the run."""
        self._delivered += read
        if not samples and not self._kinds:
            return None
        self._note(samples)
        for sample in samples:
            if self._planned is not None and self._planned(sample.epoch, sample.index) != sample.substitute:
                return SampleError(
                    f"sample {sample.index} of {self._dataset_name} (epoch {sample.epoch}) could be read when the "
                    f"stream was planned, but not afterwards: {sample.error}. The samples after it were planned with "
                    "its length, so no other sample can replace it. Make each sample fail every time or never"
                )
        failed, budget = sum(self._kinds.values()), self._policy.replacement_budget
        if self._delivered < SAMPLES_BEFORE_BUDGET or failed <= budget * self._delivered:
            return None
        reasons = "; ".join(
            f"{kind} {count} times, such as sample {self._examples[kind].index}: "
            f"{self._examples[kind].error[:_LONGEST_EXAMPLE]}"
            for kind, count in self._kinds.most_common()
        )
        # The row of a stream has no index that a file could list.
        listed = any(sample.substitute is not None for sample in self._examples.values())
        remedy = "list bad samples in quarantine_file, or raise" if listed else "or raise"
        return SampleError(
            f"on_error={self._policy.on_error!r} has skipped {failed} of {self._delivered} samples of "
            f"{self._dataset_name}, more than replacement_budget={budget:g} allows. Reasons: {reasons}. Repair the "
            f"data, {remedy} replacement_budget"
        )

    def _note(self, samples: Iterable[SkippedSample]) -> None:
        for sample in samples:
            self.skipped += 1
            if sample.substitute is not None:
                self.digest = (self.digest + combine64(sample.epoch, sample.index, sample.substitute)) % 2**63
            if sample.kind:
                self._kinds[sample.kind] += 1
                self._examples.setdefault(sample.kind, sample)
            epoch, index, error, instead = sample.epoch, sample.index, sample.error, sample.substitute
            key = hash(error) if instead is None else index
            if key in self._recorded:
                continue
            self._recorded.add(key)
            name = self._dataset_name
            if instead is None:
                logger.warning("Skipped a sample of %s after row %d of epoch %d: %s", name, index, epoch, error)
            else:
                logger.warning(
                    "Skipped sample %d of %s (epoch %d), read sample %d instead: %s", index, name, epoch, instead, error
                )
            if self._policy.on_error == "quarantine":
                self._record(sample)

    def _record(self, sample: SkippedSample) -> None:
        line = json.dumps({"index": sample.index, "error": sample.error}) + "\n"
        file = AppendFile(str(self._policy.quarantine_file))
        try:
            Path(file.path).parent.mkdir(parents=True, exist_ok=True)
            # In one write: lines of several ranks that share the file do not mix.
            file.append(line.encode())
            file.close()
        except OSError as error:
            warn_once(
                "Samples are skipped, but cannot be listed in %s (%s); the next run reads them again, and skips them "
                "if they fail",
                *(file.path, error.strerror),
            )
