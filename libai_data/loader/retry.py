"""Retries tasks whose worker died or hung, in ever smaller parts, until the sample that kills workers is found."""

from __future__ import annotations

from functools import reduce

from libai_data.data.transforms.batch import rows_together
from libai_data.errors import SampleError, indices_in_words
from libai_data.loader.executor import Payload, Task, TaskResult
from libai_data.loader.reading import row_slices
from libai_data.loader.schema import first_error
from libai_data.loader.stage_times import StageTimes

DEATHS_ALLOWED = 3
"""How often workers may die over the same samples before the samples fail."""

A_HANG_COUNTS = 2

_MOST_PARTS = 64


class Retry:
    """Counts the deaths over each task, splits tasks into parts, and joins the results of the parts."""

    def __init__(self, payload: Payload) -> None:
        self._dataset_name = type(payload.dataset).__name__
        self._together = rows_together(payload.batch_transform)
        self._may_split = payload.collator is None  # a collator needs the whole batch
        self._may_substitute = payload.policy.substitutes and self._may_split
        self._deaths: dict[tuple[int, int], int] = {}
        self._parts: dict[int, int] = {}
        self._results: dict[int, list[tuple[int, TaskResult]]] = {}

    def keep_whole(self) -> None:
        """Split no task from now on, because a collator needs the whole batch."""
        self._may_split = self._may_substitute = False

    def after_death(self, task: Task, who: str, hung: bool) -> list[Task]:
        """The tasks to run instead of a task whose worker, `who`, ended; a SampleError if this was too often.

        A hang (`hung`) counts more than a death, because it is less likely chance.
        """
        key = task.number, task.first_row
        before, deaths = self._deaths.pop(key, 0), A_HANG_COUNTS if hung else 1
        count = len(task.indices)
        if count >= 2 * self._together and self._may_split:
            parts = [_part_of(task, rows) for rows in row_slices(count, _MOST_PARTS, self._together)]
            self._parts[task.number] = self._parts.get(task.number, 1) - 1 + len(parts)
            # Parts begin with this death alone, so that a death of other samples counts against no single one.
            self._deaths.update({(part.number, part.first_row): deaths for part in parts})
            return parts
        deaths += before
        if deaths < DEATHS_ALLOWED:
            self._deaths[key] = deaths
            return [task]
        if self._may_substitute and not task.substitute_only:
            return [task._replace(substitute_only=True)]
        raise SampleError(
            f"workers repeatedly ended on samples {indices_in_words(task.indices)} of {self._dataset_name}; the last "
            f"one was {who}. If memory is short, use fewer workers or a lower prefetch"
        )

    def result_of(self, task: Task, result: TaskResult) -> TaskResult | None:
        """The result of the whole task if all of its parts are done, otherwise None."""
        self._deaths.pop((task.number, task.first_row), None)
        if task.number not in self._parts:
            return result
        results = self._results.setdefault(task.number, [])
        results.append((task.first_row, result))
        if len(results) < self._parts[task.number]:
            return None
        del self._parts[task.number], self._results[task.number]
        return _joined(task.number, [part for _, part in sorted(results, key=lambda placed: placed[0])])


def _part_of(task: Task, rows: slice) -> Task:
    return task._replace(epochs=task.epochs[rows], indices=task.indices[rows], first_row=task.first_row + rows.start)


def _joined(number: int, results: list[TaskResult]) -> TaskResult:
    times = StageTimes()
    for result in results:
        times.add(result.times)
    error = reduce(first_error, (result.error for result in results))
    return TaskResult(number, error, None, times, [skip for result in results for skip in result.skipped])
