"""The last line of a rank after an exception that nobody caught, whoever has printed the exception."""

from __future__ import annotations

import subprocess
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
    monkeypatch.setattr(watchdog, "SECONDS_FOR_THE_CAUSE", 0.0)
    with pytest.raises(Ended) as by_our_hook:
        liveness._end_after(lambda *_: None, 1, type(error), error, None)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    watching = watchdog.Liveness(0, 1, 1)
    watching._rank, watching._world_size = 1, 2
    with pytest.raises(Ended) as by_the_users:
        watching.farewell()
    assert by_our_hook.value.args == by_the_users.value.args == end


@pytest.mark.parametrize("closed", ["sys.stdout.close()", "sys.stdout = None", "os.close(1); print(1)"])
def test_a_rank_ends_with_its_reason_though_its_stdout_is_closed(closed: str) -> None:
    code = (
        "import os, sys; from libai_data.mesh.peers.watchdog import end_process\n"
        f"try: {closed}; end_process(3, 'rank 1 ends')\n"
        "finally: sys.stderr.write('it goes on')"
    )
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (3, "rank 1 ends\n")
