"""Checks whether a loader of any kind keeps the guarantees that an exact training needs.

A factory makes the loader of each rank. The checks run all ranks in this process, and stop them after every step. Then
the ranks resume from the state, with the same and with other numbers of ranks and workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from libai_data.commands.console import aligned
from libai_data.errors import ConfigError, ContractError
from libai_data.errors.argument_rules import FLAG, FUNCTION, check, or_none, several, whole
from libai_data.testing.recording import Factory, Pass, Step

_SHOWN = 5
_RULES = {
    "make_loader": FUNCTION,
    "samples": whole(1, 1 << 20),
    "endless": FLAG,
    "worlds": several(whole(1)),
    "workers": several(whole(0)),
    "indices_of": or_none(FUNCTION),
}


def check_conformance(
    make_loader: Callable[..., Iterable[Any]],
    samples: int,
    *,
    endless: bool = False,
    worlds: Sequence[int] = (1, 2, 4),
    workers: Sequence[int] = (0, 2),
    indices_of: Callable[[Any], Sequence[int]] | None = None,
    title: str = "loader",
) -> Report:
    """Check a loader of any library.

    Args:
        make_loader: makes the loader of one rank: `make_loader(rank, world, state)`, where `state` is None or what
            `loader.state_dict()` returned; a loader without `state_dict` is not resumed. If `make_loader` has a
            parameter `workers`, it is also called with other numbers of workers. Loaders are iterables of batches. Keep
            the global batch size the same for all worlds, because the stream must be the same.
        samples: length of the dataset. A few dozen, not divisible by any batch size, find the most errors.
        endless: the loader continues from epoch to epoch; otherwise each `iter(loader)` is an epoch.
        worlds: numbers of ranks to try.
        workers: numbers of workers to try; all other checks use the first number.
        indices_of: returns the index of each row of a batch, and a negative number for padding. By default a batch is
            a list of indices, or a batch of this library's loader.
        title: title of the report.

    Returns:
        A finding for each promise; `str(report)` is a table.

    Raises:
        ConfigError: The arguments are out of range, or the batches cannot be read.
    """
    check(_RULES, **locals())
    if not len(worlds):
        raise ConfigError("worlds is empty; give at least one number of ranks")
    factory = Factory(make_loader, samples, endless, indices_of)
    return _Examination(factory, tuple(worlds), tuple(workers) if factory.takes_workers else ()).report(title)


class _Examination:
    """Collects the failures of each check."""

    def __init__(self, factory: Factory, worlds: tuple[int, ...], workers: tuple[int, ...]) -> None:
        self._factory = factory
        self._worlds = worlds
        self._workers = workers
        self._cases: Counter = Counter()
        self._failures: dict[str, list[str]] = {name: [] for name in CHECKS}
        self._why_not = dict.fromkeys(CHECKS, "")

    def report(self, title: str) -> Report:
        """Run all checks."""
        whole = {world: self._uninterrupted(world) for world in self._worlds}
        self._same_on_all_worlds(whole)
        for world, epochs in whole.items():
            self._resumes(world, epochs)
        self._with_other_workers()
        return Report(
            title,
            tuple(
                Finding(
                    name,
                    self._cases[name],
                    len(self._failures[name]),
                    self._failures[name][0] if self._failures[name] else self._why_not[name],
                )
                for name in CHECKS
            ),
        )

    def _note(self, check: str, case: str, problem: str) -> None:
        self._cases[check] += 1
        if problem:
            self._failures[check].append(f"{case}: {problem}")

    def _play(self, world: int, states: list[Any] | None = None, workers: int | None = None) -> Iterator[Pass]:
        """Run two epochs, one after the other; with `states`, the first epoch is the rest after the states."""
        if workers is None and self._workers:
            workers = self._workers[0]
        job = self._factory.start(world, states, workers)
        try:
            for _ in range(2):
                yield job.play(self._factory.samples if self._factory.endless else None)
        finally:
            job.close()

    def _uninterrupted(self, world: int) -> list[Pass]:
        epochs = list(self._play(world))
        for number, each in enumerate(epochs):
            case = f"world {world}, epoch {number}"
            self._note("steps", case, _uneven(each))
            if not self._factory.endless:
                self._note("once", case, self._not_once(each.steps))
        if self._factory.endless:
            steps = [step for each in epochs for step in each.steps]
            self._note("once", f"world {world}", self._not_once(steps))
        return epochs

    def _same_on_all_worlds(self, whole: dict[int, list[Pass]]) -> None:
        first = self._worlds[0]
        for world in self._worlds[1:]:
            problem = _different(_steps(whole[first]), _steps(whole[world]))
            self._note("world", f"world {world} against {first}", problem)
        if len(self._worlds) == 1:
            self._why_not["world"] = self._why_not["elastic"] = "only one world size was given"

    def _resumes(self, world: int, epochs: list[Pass]) -> None:
        first = epochs[0]
        reference = _steps(epochs) if self._factory.endless else first.steps
        if any(state is None for state in first.states):
            for name in ("state", "elastic", "epochs"):
                self._why_not[name] = "the loader has no state_dict"
            return
        # After the last step of a pass, a loader's state may be the end of this pass or the start of the next one.
        for cut in range(len(first.steps) if self._factory.endless else len(first.steps) - 1):
            states = first.states[cut]
            assert states is not None  # checked above
            before = reference[: cut + 1]
            for other in self._worlds:
                case = f"world {world} to {other}, cut after step {cut}"
                given = states if other == world else [states[0]] * other
                resumed = list(self._play(other, given))
                rest = _steps(resumed) if self._factory.endless else resumed[0].steps
                if other == world:
                    self._note("state", case, _not_equal(reference[cut + 1 :], rest, cut + 1))
                else:
                    problem = _different(reference, before + rest) or self._not_once(before + rest)
                    self._note("elastic", case, problem)
                self._note("epochs", case, self._not_whole(before, resumed))

    def _not_once(self, steps: list[Step]) -> str:
        return _not_once(steps, self._factory.samples, self._factory.endless)

    def _not_whole(self, before: list[Step], resumed: list[Pass]) -> str:
        if self._factory.endless:
            return _uneven(resumed[0]) or self._not_once(before + _steps(resumed))
        problem = _uneven(resumed[0]) or self._not_once(before + resumed[0].steps)
        if problem:
            return f"the resumed epoch: {problem}"
        problem = _uneven(resumed[1]) or self._not_once(resumed[1].steps)
        return f"the epoch after it: {problem}" if problem else ""

    def _with_other_workers(self) -> None:
        if len(self._workers) < 2:
            self._why_not["workers"] = "make_loader has no parameter `workers`, or only one number was given"
            return
        world = self._worlds[-1]
        alone = list(self._play(world))
        cut = len(alone[0].steps) // 2
        for workers in self._workers[1:]:
            with_more = list(self._play(world, workers=workers))
            self._note("workers", f"{workers} workers", _not_equal(_steps(alone), _steps(with_more), 0))
            if cut < 1 or len(with_more[0].steps) < cut:
                continue
            states, other_states = alone[0].states[cut - 1], with_more[0].states[cut - 1]
            if states is None or other_states is None:
                continue
            expected = alone[0].steps[cut:]
            for case, given, number in (
                (f"{self._workers[0]} to {workers} workers", states, workers),
                (f"{workers} to {self._workers[0]} workers", other_states, self._workers[0]),
            ):
                rest = next(self._play(world, given, number)).steps
                self._note("workers", f"{case}, cut after step {cut - 1}", _not_equal(expected, rest, cut))


def _steps(epochs: list[Pass]) -> list[Step]:
    return [step for each in epochs for step in each.steps]


def _uneven(each: Pass) -> str:
    if len(set(each.ended)) <= 1:
        return ""
    return f"the ranks take {each.ended} steps"


def _not_once(steps: list[Step], samples: int, endless: bool) -> str:
    """The problem if an index occurs twice within an epoch, is missing, or is not in the dataset; else "".

    In an endless stream, an epoch may end in the middle of a step. So the check is only that, after each step, no index
    is two epochs ahead of another index.
    """
    counts: Counter = Counter(dict.fromkeys(range(samples), 0))
    total = 0
    for number, step in enumerate(steps):
        indices = [index for each in step for index in each]
        strangers = [index for index in indices if not 0 <= index < samples]
        if strangers:
            return f"step {number} has index {strangers[0]}; the dataset has {samples} samples"
        counts.update(indices)
        total += len(indices)
        epoch = -(-total // samples) if endless else 1
        often = [index for index in indices if counts[index] > epoch]
        if often:
            return f"index {often[0]} comes a {_ordinal(counts[often[0]])} time in step {number}, in epoch {epoch - 1}"
    missing = sorted(index for index, count in counts.items() if count < max(1, total // samples))
    return f"{len(missing)} of {samples} indices are missing: {_listed(missing)}" if missing else ""


def _not_equal(expected: list[Step], found: list[Step], first: int) -> str:
    """The first difference between `found` and `expected`, or that `found` ends earlier; else ""."""
    for number, (left, right) in enumerate(zip(expected, found)):
        for rank, (ours, theirs) in enumerate(zip(left, right)):
            if ours != theirs:
                return f"step {first + number}, rank {rank} has {_listed(theirs)} instead of {_listed(ours)}"
    if any(len(indices) > 0 for step in expected[len(found) :] for indices in step):
        return f"it ends after step {first + len(found) - 1} instead of {first + len(expected) - 1}"
    return ""


def _different(expected: list[Step], found: list[Step]) -> str:
    """The first difference at a step after which both streams have used the same number of samples; else ""."""
    ours, theirs = iter(expected), iter(found)
    surplus: Counter = Counter()  # how often `found` has used an index more than `expected`
    total = ahead = 0  # samples that `expected` has used, and how many more than `found`
    while (step := next(ours if ahead <= 0 else theirs, None)) is not None:
        indices = [index for each in step for index in each]
        if ahead <= 0:
            surplus.subtract(indices)
            total, ahead = total + len(indices), ahead + len(indices)
        else:
            surplus.update(indices)
            ahead -= len(indices)
        if ahead == 0:
            changed, lacking = sorted((+surplus).elements()), sorted((-surplus).elements())
            if changed:
                return f"the first {total} samples have {_listed(changed)} instead of {_listed(lacking)}"
            surplus.clear()
    return ""


def _listed(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:_SHOWN]))
    return f"[{shown}, ...]" if len(indices) > _SHOWN else f"[{shown}]"


def _ordinal(number: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(number, f"{number}th")


CHECKS: dict[str, str] = {
    "once": "every index once an epoch",
    "steps": "equal steps on all ranks",
    "world": "same stream on other world sizes",
    "state": "state restored at every step",
    "elastic": "state restored on other world sizes",
    "workers": "same stream with other worker counts",
    "epochs": "epochs whole after a resume",
}
"""Name of each check -> the promise that it checks."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        check: name of the check, a key of `CHECKS`.
        cases: how many cases were tried; 0 if the check does not apply.
        failed: how many cases failed.
        detail: the first failure, or the reason why no case was tried.
    """

    check: str
    cases: int
    failed: int
    detail: str

    @property
    def verdict(self) -> str:
        """ "kept", "BROKEN" or "not checked"."""
        if not self.cases:
            return "not checked"
        return "BROKEN" if self.failed else "kept"


@dataclass(frozen=True)
class Report:
    """The results of all checks, in the order of `CHECKS`.

    Args:
        title: name of the loader that was checked.
        findings: one for each check.
    """

    title: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.broken

    @property
    def broken(self) -> list[str]:
        """Names of the checks that failed."""
        return [finding.check for finding in self.findings if finding.failed]

    def __str__(self) -> str:
        """The table as text."""
        lines = aligned([("promise", "verdict", "cases", "first failure"), *self._rows()])
        return "\n".join([self.title, "", lines[0], "-" * len(lines[0]), *lines[1:]])

    def markdown(self) -> str:
        """The table in Markdown."""
        rows = [("promise", "verdict", "cases", "first failure"), ("---",) * 4, *self._rows()]
        return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)

    def raise_if_broken(self) -> None:
        """Raise an error with the table if a check failed.

        Raises:
            ContractError: A check failed.
        """
        if not self.passed:
            raise ContractError(f"the loader breaks {len(self.broken)} promise(s):\n{self}")

    def _rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (
                CHECKS[finding.check],
                finding.verdict,
                f"{finding.failed} of {finding.cases}" if finding.failed else str(finding.cases),
                finding.detail,
            )
            for finding in self.findings
        ]
