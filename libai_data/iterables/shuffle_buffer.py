"""A shuffle buffer whose state is a few numbers: the number of drawn rows determines which rows are in the buffer."""

from __future__ import annotations

import json
import operator
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from libai_data.data.random.hashing import combine64, mix64_array
from libai_data.errors import CheckpointError
from libai_data.iterables.plain_state import saved_in
from libai_data.iterables.shared_use import SaveState

_END = object()
_DRAWN_AT_ONCE = 256
_LAST_ROWS = 1


class ShuffleBuffer:
    """Draws each row at random from the next `size` rows of a stream.

    Draw `t` is a function of `key` and `t`. It replaces row `slot(t)` of the buffer by row `t + size` of the stream. So
    the rows in the buffer can be computed for any `t`. The state holds `t` and a state of the stream from before the
    oldest of these rows. A resume reads the rows from there on, about 7 times `size` for a buffer of 1,000.

    Args:
        rows: the stream, from its beginning, or from the state.
        save: saves the state of the stream; None if it has no state.
    """

    def __init__(self, rows: Iterator[Any], save: SaveState | None, size: int, key: int, state: str | None) -> None:
        self._rows, self._save, self._size, self._key = rows, save, size, key
        self._kept: list[Any] = []
        self._numbers = np.empty(0, np.int64)
        self._marks: deque[tuple[int, str | None]] = deque()
        self._read = self._drawn = 0
        self._total: int | None = None
        if state is not None:
            with saved_in(state) as saved:
                self._drawn, self._read = operator.index(saved["drawn"]), operator.index(saved["row"])
                self._total = None if saved["total"] is None else operator.index(saved["total"])
                self._marks.append((self._read, json.dumps(saved["source"])))

    def rows(self) -> Iterator[Any]:
        """The rows, in their new order."""
        drawn_of_the_end = self._fill()
        while self._total is None:
            first = self._drawn
            for slot in self._slots(first, first + _DRAWN_AT_ONCE).tolist():
                row = self._next()
                if row is _END:
                    break
                drawn, self._kept[slot], self._numbers[slot] = self._kept[slot], row, self._read - 1
                self._drawn += 1
                yield drawn
        generator = np.random.Generator(np.random.Philox(key=combine64(self._key, _LAST_ROWS)))
        for slot in generator.permutation(len(self._kept)).tolist()[drawn_of_the_end:]:
            self._drawn += 1
            yield self._kept[slot]

    def _fill(self) -> int:
        """Fill the buffer; returns how many of its rows were drawn after the end of the stream."""
        size, total, is_restored = self._size, self._total, bool(self._marks)
        replaced = self._drawn if total is None else min(self._drawn, max(0, total - size))
        last = replaced + size if total is None else min(total, replaced + size)
        numbers = self._numbers_at(replaced)[: last - replaced]
        slots = {number: slot for slot, number in enumerate(numbers.tolist())}
        found: dict[int, Any] = {}
        while self._read < last:
            number, row = self._read, self._next()
            if row is _END:
                break
            if number in slots:
                found[slots[number]] = row
        if is_restored and len(found) < len(numbers):
            raise CheckpointError(
                f"the stream that a shuffle buffer reads has become shorter: it ended after {self._read} rows, but the "
                f"checkpoint was saved after row {last - 1}"
            )
        if total is not None:
            self._next()  # The end, by which the iterable knows that the next epoch begins.
        self._kept = [found[slot] for slot in range(len(found))]
        self._numbers = numbers[: len(found)]
        return self._drawn - replaced

    def _next(self) -> Any:
        interval = max(_DRAWN_AT_ONCE, self._size // 4)
        if self._save is not None and (not self._marks or self._read - self._marks[-1][0] >= interval):
            self._marks.append((self._read, self._save()))
            self._forget_marks()
        row = next(self._rows, _END)
        if row is _END:
            self._total = self._read
        else:
            self._read += 1
        return row

    def _forget_marks(self) -> None:
        oldest = int(self._numbers.min()) if len(self._numbers) else self._marks[0][0]
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            self._marks.popleft()

    def _slots(self, start: int, stop: int) -> np.ndarray:
        words = np.uint64(self._key) + np.arange(start, stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (mix64_array(words) % np.uint64(self._size)).astype(np.int64)

    def _numbers_at(self, drawn: int) -> np.ndarray:
        """The numbers of the rows that the buffer holds after so many draws, int64 [size]."""
        numbers = np.full(self._size, -1, np.int64)
        stop, step = drawn, 4 * self._size
        while stop and (numbers < 0).any():
            start = max(0, stop - step)
            newest = np.full(self._size, -1, np.int64)
            newest[self._slots(start, stop)] = np.arange(start, stop) + self._size
            numbers = np.where(numbers < 0, newest, numbers)
            stop = start
        return np.where(numbers < 0, np.arange(self._size), numbers)

    def state(self) -> str | None:
        """The number of draws, and where to read the rows of the buffer, as JSON text; None without a state of the
        stream."""
        if not self._marks:
            return None
        self._forget_marks()
        row, source = self._marks[0]
        if source is None:
            return None
        return json.dumps({"drawn": self._drawn, "total": self._total, "row": row, "source": json.loads(source)})
