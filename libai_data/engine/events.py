"""What a training run measures: named scalars with the iteration at which each was put."""

from __future__ import annotations

from collections import deque
from typing import Any

_HISTORY_LENGTH = 1000

_open_storages: list[EventStorage] = []


def get_event_storage() -> EventStorage:
    """Return the storage of the training that runs now; raises RuntimeError outside `TrainerBase.train`."""
    if not _open_storages:
        raise RuntimeError("no training is running: call get_event_storage() from within TrainerBase.train()")
    return _open_storages[-1]


class ScalarHistory:
    """The last values of one scalar, at most 1,000, each with the iteration it belongs to.

    `count` is the number of values put so far; a writer computes from it which values are new. `smoothing_hint` says
    whether writers should average the values between two writings.
    """

    def __init__(self) -> None:
        self.count = 0
        self.smoothing_hint = True
        self._values: deque[tuple[float, int]] = deque(maxlen=_HISTORY_LENGTH)

    def update(self, value: float, iteration: int) -> None:
        self._values.append((value, iteration))
        self.count += 1

    def values(self) -> list[tuple[float, int]]:
        """All values that are kept, as (value, iteration), oldest first."""
        return list(self._values)


class EventStorage:
    """Scalars put by trainers and hooks, for writers to read.

    Attributes:
        start_iter: the first iteration.
        iter: the iteration to which `put_scalar` assigns a value by default.
        samples: samples consumed so far, over all ranks and since the training's first step.
        results: names of the results of the evaluations so far; None before the first evaluation.
        is_due: writers write after this step, whatever their period, because the next evaluation replaces a result.
    """

    def __init__(self, start_iter: int = 0) -> None:
        self.start_iter = self.iter = start_iter
        self.samples = 0
        self.results: set[str] | None = None
        self.is_due = False
        self._histories: dict[str, ScalarHistory] = {}

    def put_scalar(self, name: str, value: float, smoothing_hint: bool = True, iteration: int | None = None) -> None:
        """Put one value.

        Args:
            name: e.g. "lr"; names with "loss" are shown on the console.
            value: a number, or a value that `float` accepts.
            smoothing_hint: whether writers should average the values between two writings.
            iteration: the iteration to which the value belongs; by default the current one.

        Raises:
            TypeError: `value` is no single number.
        """
        try:
            number = float(value)
        except Exception as error:  # Tensors raise errors of many classes.
            raise TypeError(f"the scalar {name!r} is {value!r:.100}; put a single number, such as its mean") from error
        history = self._histories.setdefault(name, ScalarHistory())
        history.update(number, self.iter if iteration is None else iteration)
        history.smoothing_hint = smoothing_hint

    def put_scalars(self, *, smoothing_hint: bool = True, **scalars: float) -> None:
        """Put several values, given by keyword."""
        for name, value in scalars.items():
            self.put_scalar(name, value, smoothing_hint=smoothing_hint)

    def history(self, name: str) -> ScalarHistory:
        """The values of scalar `name`; raises KeyError if it was never put."""
        if name not in self._histories:
            raise KeyError(f"no scalar '{name}' was put; there are {sorted(self._histories)}")
        return self._histories[name]

    def histories(self) -> dict[str, ScalarHistory]:
        """The values of all scalars."""
        return self._histories

    def latest(self) -> dict[str, tuple[float, int]]:
        """For each scalar, its last value and the iteration of this value."""
        return {name: history._values[-1] for name, history in self._histories.items()}

    def __enter__(self) -> EventStorage:
        _open_storages.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _open_storages.remove(self)
