"""One iterable in several loaders, which may read it in turn, but not at the same time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Callable, Optional

from libai_data.errors import PassError

SaveState = Callable[[], Optional[str]]
"""Returns the state of the iteration, as JSON text; None as long as it is not known."""

Opened = tuple[Iterator[Any], Optional[SaveState]]
"""The rows of an epoch, and the function that saves their state; None if there is no state."""


class Uses:
    """What the loaders of one iterable share.

    Attributes:
        fresh_state: state of the iterable before the first epoch, as JSON text; None if it is not known.
        has_begun: whether a loader has begun to read the iterable.
        is_broken_off: whether an epoch was begun, but not read to its end.
        newest: weak reference to the rows that a loader began to read last.
    """

    fresh_state: str | None = None
    has_begun = False
    is_broken_off = False

    def __init__(self) -> None:
        self.newest: Callable[[], Alone | None] = lambda: None


_uses: weakref.WeakValueDictionary[int, Uses] = weakref.WeakValueDictionary()


def uses_of(thing: Any) -> Uses:
    """The `Uses` of an iterable, which live as long as the iterable or one of its loaders."""
    found = _uses.get(id(thing))
    if found is None:
        _uses[id(thing)] = found = Uses()
        with suppress(TypeError):  # Not every object supports weak references.
            weakref.finalize(thing, id, found).atexit = False
    return found


class Alone:
    """The rows of an iterable that only one loader can read at a time, until another loader begins to read them."""

    def __init__(self) -> None:
        self._used: list[tuple[Uses, str, Any]] = []
        self._rows: Iterator[Any] = iter(())

    def use(self, thing: Any, name: str) -> None:
        """Become the only reader of an iterable, iterator or file; the reader before gets an error with this name."""
        # The reference keeps the thing alive, so that no other thing gets its id.
        self._used.append((uses_of(thing), name, thing))
        self._used[-1][0].newest = weakref.ref(self)

    def reading(self, rows: Iterator[Any], save: SaveState | None) -> Opened:
        """Set the rows; returns this iterator, and the function that saves the state of the rows."""
        self._rows = rows
        return self, None if save is None else partial(self._saved, save)

    def __iter__(self) -> Alone:
        return self

    def __next__(self) -> Any:
        self._check()
        row = next(self._rows)
        self._check()
        return row

    def _saved(self, save: SaveState) -> str | None:
        state = save()
        self._check()
        return state

    def _check(self) -> None:
        for uses, name, _ in self._used:
            if uses.newest() is not self:
                raise PassError(
                    f"another loader has begun to read the same {name}, and this object stores its epoch or its place "
                    "itself. Give each loader its own object, or the function that makes the object"
                )
