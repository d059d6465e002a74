"""A loader is read by one thread at a time."""

from __future__ import annotations

import threading
from threading import get_ident
from typing import Any

from libai_data.errors import PassError

USER = "user"


class OneThread:
    """Raises a PassError if two threads move a loader at the same time: otherwise, a batch could come twice.

    A thread may use it again while it uses it. A thread that has ended, or that a fork does not have, uses nothing.
    """

    def __init__(self) -> None:
        self.users: dict[str, int] = {}
        """The id of the thread that uses the loader; empty if none does."""

    def begin(self) -> None:
        own = get_ident()
        user = self.users.setdefault(USER, own)  # one step, for all threads
        if user != own:
            for thread in threading.enumerate():
                if thread.ident == user:
                    raise PassError(
                        f"{thread.name} uses this loader now, and {threading.current_thread().name} cannot read, "
                        "begin, restore or move it meanwhile; use a loader in one thread at a time. Only close() and "
                        "state_dict() may come from other threads"
                    )
            self.users[USER] = own

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: Any) -> None:
        self.users = {}
