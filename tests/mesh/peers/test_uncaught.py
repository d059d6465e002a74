"""The last line of a rank after an exception that nobody caught, whoever has printed the exception."""

from __future__ import annotations

import sys

import pytest

from libai_data.errors import PeerError
from libai_data.mesh.peers import liveness, watchdog


class Ended(Exception):
    """In place of the end of the process."""


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (PeerError("rank 0 is gone; see its output"), (1, "rank 1 ends: rank 0 is gone; see its output")),
        (RuntimeError("broken"), (1, "rank 1 ends: see the exception above")),
        (KeyboardInterrupt(), (130, "rank 1 was interrupted")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rank_gives_the_same_reason_with_an_excepthook_of_the_users_own(
    error: BaseException, end: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_process(*told: object) -> None:
        raise Ended(*told)

    monkeypatch.setattr(watchdog, "end_process", end_process)
    with pytest.raises(Ended) as by_our_hook:
        liveness._end_after(lambda *_: None, 1, type(error), error, None)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    watching = watchdog.Liveness(0, 1, 1)
    watching._rank, watching._world_size = 1, 2
    with pytest.raises(Ended) as by_the_users:
        watching.farewell()
    assert by_our_hook.value.args == by_the_users.value.args == end
