"""What a training run measures: named scalars with the iteration at which each was put."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_HISTORY_LENGTH = 1000

_open_storages: list[EventStorage] = []


def get_event_storage() -> EventStorage:
    """Return the storage of the training that runs now.

    Raises:
        RuntimeError: Called outside `TrainerBase.train`.
    """
    if not _open_storages:
        raise RuntimeError("no training is running: call get_event_storage() from within TrainerBase.train()")
    return _open_storages[-1]


class ScalarHistory:
    """The last values of one scalar, at most 1,000, each with the iteration it belongs to."""

    def __init__(self) -> None:
        self._values: deque[tuple[int, float]] = deque(maxlen=_HISTORY_LENGTH)

    def update(self, value: float, iteration: int) -> None:
        """Append `value`, which belongs to `iteration`."""
        self._values.append((iteration, value))

    def latest(self) -> float:
        """The value put last."""
        return self._values[-1][1]

    def values(self) -> list[tuple[float, int]]:
        """All values still held, as (value, iteration), oldest first."""
        return [(value, iteration) for iteration, value in self._values]

    def avg(self, window_size: int) -> float:
        """Mean of the last `window_size` values."""
        return statistics.fmean(self._last(window_size))

    def median(self, window_size: int) -> float:
        """Median of the last `window_size` values."""
        return statistics.median(self._last(window_size))

    def since(self, iteration: int) -> list[float]:
        """The values that belong to iterations after `iteration`."""
        return [value for at, value in self._values if at > iteration]

    def _last(self, window_size: int) -> list[float]:
        return [value for _, value in list(self._values)[-window_size:]]


class EventStorage:
    """Scalars put by trainers and hooks, for writers to read.

    Attributes:
        iter: the iteration to which `put_scalar` assigns a value unless told otherwise.
        samples: samples consumed so far, over all ranks and since the training's first step.
    """

    def __init__(self, start_iter: int = 0) -> None:
        self.iter = start_iter
        self.samples = 0
        self._histories: dict[str, ScalarHistory] = {}
        self._smoothing: dict[str, bool] = {}
        self._latest: dict[str, tuple[float, int]] = {}
        self._updates: dict[str, int] = {}
        self._prefix = ""

    def put_scalar(self, name: str, value: float, smoothing_hint: bool = True, iteration: int | None = None) -> None:
        """Put one value.

        Args:
            name: e.g. "lr"; what contains "loss" is shown on the console.
            value: a number, or whatever `float` turns into one.
            smoothing_hint: whether writers should average the values between two writings.
            iteration: the iteration it belongs to; by default the current one.
        """
        name = self._prefix + name
        value = float(value)
        at = self.iter if iteration is None else iteration
        self._histories.setdefault(name, ScalarHistory()).update(value, at)
        self._latest[name] = (value, at)
        self._smoothing[name] = smoothing_hint
        self._updates[name] = self._updates.get(name, 0) + 1

    def put_scalars(self, *, smoothing_hint: bool = True, **scalars: float) -> None:
        """Put several values, given by keyword."""
        for name, value in scalars.items():
            self.put_scalar(name, value, smoothing_hint=smoothing_hint)

    def history(self, name: str) -> ScalarHistory:
        """The values of scalar `name`.

        Raises:
            KeyError: It was never put.
        """
        if name not in self._histories:
            raise KeyError(f"no scalar '{name}' was put; there are {sorted(self._histories)}")
        return self._histories[name]

    def histories(self) -> dict[str, ScalarHistory]:
        """The values of all scalars."""
        return self._histories

    def latest(self) -> dict[str, tuple[float, int]]:
        """For each scalar its last value and the iteration of that."""
        return self._latest

    def smoothing_hints(self) -> dict[str, bool]:
        """For each scalar whether writers should average it."""
        return self._smoothing

    def update_counts(self) -> dict[str, int]:
        """For each scalar how often it was put: how a writer knows what is new to it."""
        return self._updates

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Within it, the names of all scalars are prefixed by ``name/``."""
        before = self._prefix
        self._prefix = name.rstrip("/") + "/"
        try:
            yield
        finally:
            self._prefix = before

    def __enter__(self) -> EventStorage:
        _open_storages.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _open_storages.remove(self)
