"""What was used last, up to a number of bytes."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Callable

_MOST_VALUES = 1 << 14


class LastUsed:
    """Values that took long to make, kept until those used after them need their room.

    All shards of a source share one, and so do threads. Another process, forked or not, begins with none.

    Args:
        limit: bytes; one value is kept even if it has more. Also, no more than 16,384 values are kept: a process may
            have 65,530 memory maps.

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
        # Both steps are whole without the lock, which would take as long as they do.
        found = self._values.get(key)
        if found is None:
            return None
        try:
            self._values.move_to_end(key)
        except KeyError:  # Another thread has let go of it meanwhile.
            return None
        return found[0]

    def put(self, key: Hashable, value: Any, size: int) -> Any:
        """Keep a value, and let go of those that were used longest ago; returns the value."""
        with self._lock:
            self._bytes += size - self._values.pop(key, (None, 0))[1]
            self._values[key] = value, size
            self._make_room(1)
        return value

    def opened(self, key: Hashable, size: int, open_it: Callable[[], Any]) -> Any:
        """The value of a key. If it is not kept, others are let go of before it is opened, so that all have room."""
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
        """Let go of a value."""
        with self._lock:
            self._bytes -= self._values.pop(key, (None, 0))[1]

    def clear(self) -> None:
        """Let go of all values."""
        with self._lock:
            self._bytes -= sum(size for _, size in self._values.values())
            self._values.clear()

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
