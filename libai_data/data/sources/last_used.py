"""What was used last, up to a number of bytes."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Callable


class LastUsed:
    """Values that took long to make, kept until those used after them need their room.

    All shards of a source share one, and so do threads. Another process, forked or not, begins with none.

    Args:
        limit: bytes; one value is kept even if it has more.

    Attributes:
        limit: the same.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes, self._forks = 0, _forks
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """The value of a key, or None if it is not kept."""
        if self._forks != _forks:
            self.__init__(self.limit)  # type: ignore[misc]
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: Any, size: int) -> Any:
        """Keep a value, and let go of those that were used longest ago; returns the value."""
        with self._lock:
            self._bytes += size - self._values.pop(key, (None, 0))[1]
            self._values[key] = value, size
            while self._bytes > self.limit and len(self._values) > 1:
                self._bytes -= self._values.popitem(last=False)[1][1]
        return value

    def clear(self) -> None:
        """Let go of all values."""
        with self._lock:
            self._values.clear()
            self._bytes = 0

    def made(self, key: Hashable, make: Callable[[], tuple[Any, int]]) -> Any:
        """The value of a key; `make` gives it with its bytes if it is not kept."""
        found = self.get(key)
        return self.put(key, *make()) if found is None else found

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.limit,)


_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)
