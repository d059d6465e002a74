"""The outputs of a stream transform over one round, as a dataset."""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from libai_data.data.datasets.combine import check_index
from libai_data.data.datasets.stream_transform import StreamTransform, start_of, starts_in
from libai_data.data.random.hashing import combine64
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import check_types

_DRAWS_OF_INPUTS = 1


@dataclass(frozen=True)
class _InOrder:
    """One round through samples, as they lie."""

    size: int
    seed: int

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        there = positions[positions < self.size]
        return np.zeros_like(there), there


class OneRound:
    """The outputs of a stream transform over one round, as a dataset: to evaluate on, or to shuffle what is packed.

    Where the outputs begin is found once, when it is made; see `StreamTransform.amounts` for what that costs. The last
    one may be padded.

    Args:
        transform: of which a copy is used.
        seed: of random transforms of the samples, which are the same in each round.
    """

    def __init__(self, transform: StreamTransform, seed: int = 0) -> None:
        if not isinstance(transform, StreamTransform):
            raise ConfigError(
                f"transform is a {type(transform).__name__}; it must be a stream transform, such as PackedDataset"
            )
        check_types(OneRound, locals())
        size = len(transform)
        self._transform = copy(transform)
        # Of their own, so that what is drawn from the outputs is something else than what their samples drew.
        self._transform._order = _InOrder(size, combine64(int(seed), _DRAWS_OF_INPUTS))
        self._transform._windows, self._transform._amounts = OrderedDict(), OrderedDict()
        if transform.window:
            windows = map(self._transform.window_at, range(0, size, transform.window))
            starts = [starts_in(window, np.arange(len(window.outputs))) for window in windows]
            self._starts = np.concatenate([np.empty(0, np.int64), *starts])
            return
        amounts = self._transform.amounts(np.zeros(size, np.int64), np.arange(size))
        self._starts = _starts_of(amounts, transform.units, transform.cuts or transform.units == 1)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        check_index(index, len(self))
        return self._transform[int(self._starts[index])]

    def fingerprint(self) -> dict[str, Any]:
        """What is done to which dataset."""
        return {**self._transform.fingerprint(), "outputs": len(self)}


def _starts_of(amounts: np.ndarray, units: int, cuts: bool) -> np.ndarray:
    """Where outputs begin, if samples of these amounts come one behind the other; see `start_of`."""
    ends = np.cumsum(amounts)
    total = int(ends[-1]) if len(ends) else 0
    before = ends - amounts
    if cuts:
        bounds = np.arange(0, total, units)
        firsts = np.searchsorted(ends, bounds, side="right")
        return np.asarray(start_of(firsts, bounds - before[firsts]))
    starts, begin = [], 0
    while begin < total:
        first = int(np.searchsorted(ends, begin, side="right"))
        starts.append(first)
        begin = int(ends[np.searchsorted(ends, begin + units, side="right") - 1])
    return np.array(starts, dtype=np.int64)
