"""One iterable in several loaders, which may read it in turn, but not at the same time."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import get_ident
from typing import Any, Callable, Optional

from libai_data.errors import PassError

SaveState = Callable[[], Optional[str]]
"""Returns the state of the iteration, as JSON text; None as long as it is not known."""

_POLL_SECONDS = 0.01

Opened = tuple[Iterator[Any], Optional[SaveState]]
"""The rows of an epoch, and the function that saves their state; None if there is no state."""


class Uses:
    """What the loaders of one iterable share."""

    fresh_state: str | None = None  # of the iterable before the first epoch, as JSON text; None if it is not known
    has_begun = False  # a loader has begun to read the iterable
    is_broken_off = False  # an epoch was begun, but not read to its end; or not from its beginning

    def __init__(self) -> None:
        self.newest: Callable[[], Alone | None] = lambda: None  # weak reference to the rows begun last
        # Weak references to files and iterators that the newest epoch reads; later epochs may read them too.
        self.places: list[Callable[[], Any]] = []


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
        self._thread = 0  # id of the thread that runs code of the iterable; 0 if none does

    def use(self, thing: Any, name: str) -> None:
        """Become the only reader of an iterable, iterator or file; the reader before gets an error with this name.

        Waits until this reader has its item, because the item moves the place of the iterable.
        """
        uses = uses_of(thing)
        before, uses.newest = uses.newest(), weakref.ref(self)
        # The reference keeps the thing alive, so that no other thing gets its id.
        self._used.append((uses, name, thing))
        while before is not None and before._thread not in (0, get_ident()):
            time.sleep(_POLL_SECONDS)

    def use_again(self, uses: Uses, name: str) -> None:
        """Use the places of the newest epoch, before the iterable goes back to their beginning: the reader before would
        read on from there."""
        for reference in uses.places:
            place = reference()
            if place is not None:
                self._use_place(place, name)

    def use_places(self, uses: Uses, name: str, places: Iterable[Any]) -> None:
        """Use what an epoch reads, and note it for later epochs."""
        uses.places = []
        for place in places:
            if uses_of(place).newest() is not self:
                self._use_place(place, name)
            with suppress(TypeError):  # What supports no weak references is made anew for each epoch.
                uses.places.append(weakref.ref(place))

    def _use_place(self, place: Any, name: str) -> None:
        self.use(place, f"{type(place).__name__} within {name}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """For a block that runs code of the iterable."""
        self._thread = get_ident()
        try:
            yield
        finally:
            self._thread = 0

    def reading(self, rows: Iterator[Any], save: SaveState | None) -> Opened:
        """Set the rows; returns this iterator, and the function that saves the state of the rows. Without `use`,
        returns the arguments."""
        if not self._used:
            return rows, save
        self._rows = rows
        return self, None if save is None else partial(self._saved, save)

    def __iter__(self) -> Alone:
        return self

    def __next__(self) -> Any:
        with self.running():
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
