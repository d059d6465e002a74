"""What was used last, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Callable, Generic, TypeVar

Value = TypeVar("Value")


class LastUsed(Generic[Value]):
    """Values that took long to make, kept until those used after them need their room; none of them is pickled.

    Args:
        limit: bytes; one value is kept even if it has more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[int, tuple[Value, int]] = OrderedDict()
        self._bytes = 0

    def get(self, number: int, make: Callable[[int], tuple[Value, int]]) -> Value:
        """The value of a number, made if it is not kept.

        Args:
            number: of the value.
            make: gives the value of a number, and its bytes.
        """
        if number not in self._values:
            self.put(number, *make(number))
        self._values.move_to_end(number)
        return self._values[number][0]

    def put(self, number: int, value: Value, size: int) -> None:
        """Keep a value, and let go of those that were used longest ago."""
        self._values[number] = value, size
        self._bytes += size
        while self._bytes > self._limit and len(self._values) > 1:
            self._bytes -= self._values.popitem(last=False)[1][1]

    def __contains__(self, number: int) -> bool:
        return number in self._values

    def __getitem__(self, number: int) -> Value:
        self._values.move_to_end(number)
        return self._values[number][0]

    def __getstate__(self) -> dict[str, Any]:
        return {"_limit": self._limit, "_values": OrderedDict(), "_bytes": 0}
