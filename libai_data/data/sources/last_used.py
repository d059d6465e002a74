"""A cache of the last used values, limited by bytes."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Callable

_MOST_VALUES = 1 << 14


class LastUsed:
    """A cache of values that are expensive to make; if it is full, it drops the least recently used ones.

    All shards of a source share one cache, and so do threads. Another process, forked or not, begins with an empty one.
    `limit` is in bytes; one value is kept even if it has more. In addition, at most 16,384 values are kept: a process
    may have 65,530 memory maps.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes, self._forks = 0, _forks
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """The value of a key, or None if it is not in the cache."""
        if self._forks != _forks:
            self.__init__(self.limit)  # type: ignore[misc]
        # Both steps are atomic without the lock. The lock would cost as much time as they do.
        found = self._values.get(key)
        if found is None:
            return None
        try:
            self._values.move_to_end(key)
        except KeyError:  # Another thread has dropped the value meanwhile.
            return None
        return found[0]

    def put(self, key: Hashable, value: Any, size: int) -> Any:
        """Store a value of `size` bytes, drop the least recently used ones if necessary, and return the value."""
        with self._lock:
            self._bytes += size - self._values.pop(key, (None, 0))[1]
            self._values[key] = value, size
            self._make_room(1)
        return value

    def opened(self, key: Hashable, size: int, open_it: Callable[[], Any]) -> Any:
        """The value of a key. If it is not in the cache, drop others before `open_it` makes it, so that all fit."""
        found = self.get(key)
        if found is not None:
            return found
        with self._lock:
            self._bytes += size
            self._make_room(0)
        try:
            value = open_it()
        finally:
            with self._lock:
                self._bytes -= size
        return self.put(key, value, size)

    def _make_room(self, left: int) -> None:
        while len(self._values) > left and (self._bytes > self.limit or len(self._values) > _MOST_VALUES):
            self._bytes -= self._values.popitem(last=False)[1][1]

    def forget(self, key: Hashable) -> None:
        """Drop a value."""
        with self._lock:
            self._bytes -= self._values.pop(key, (None, 0))[1]

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._bytes -= sum(size for _, size in self._values.values())
            self._values.clear()

    def made(self, key: Hashable, make: Callable[[], tuple[Any, int]]) -> Any:
        """The value of a key; if it is not in the cache, `make` returns the value and its size in bytes."""
        found = self.get(key)
        return self.put(key, *make()) if found is None else found

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.limit,)


_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)
