"""Ranks that are launched together and measure what they are told, in lockstep; this module is their program too."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import TracebackType
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl
_SECONDS_TO_COME = 120.0
_SECONDS_TO_ANSWER = 300.0
_SECONDS_TO_LEAVE = 20.0
_LONGEST_OUTPUT = 4000


class RanksError(RuntimeError):
    """A rank failed, or did not come or answer; the message holds what the ranks wrote."""


class Ranks:
    """Ranks on this machine, from the first `with` to the end of the last: the contenders of a row share one launch.

    Args:
        ranks: how many.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._users = 0
        self._links: list[Connection] = []
        self._launched = ExitStack()
        self._output: IO[bytes]

    def __enter__(self) -> Ranks:
        if not self._users:
            with ExitStack() as stack:
                self._launch(stack)
                self._launched = stack.pop_all()
        self._users += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if not self._users:
            self._launched.close()

    def _launch(self, stack: ExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="libai_data_ranks_"))
        self._output = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._links = []
        address = str(Path(folder, "meet"))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(address)
        listener.listen(self._ranks)
        listener.settimeout(_SECONDS_TO_COME)
        command = [sys.executable, "-m", "libai_data.launch", "--nproc_per_node", str(self._ranks)]
        launcher = subprocess.Popen(
            [*command, "-m", __name__, address],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            preexec_fn=_end_with_parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        stack.callback(_end, launcher)
        try:
            for _ in range(self._ranks):
                link = Connection(listener.accept()[0].detach())
                self._links.append(stack.enter_context(link))
        except OSError as error:
            raise self._failed(f"{len(self._links)} of {self._ranks} ranks came: {error}") from error

    def tell(self, *order: Any) -> float:
        """Have all ranks carry out an order; returns rank 0's answer.

        Args:
            order: name of a contender, and a `Scale` to open it; without one, it is measured.

        Raises:
            RanksError: A rank failed.
        """
        values = {}
        try:
            for link in self._links:
                link.send(order)
            for link in self._links:
                if not link.poll(_SECONDS_TO_ANSWER):
                    raise TimeoutError(f"no answer in {_SECONDS_TO_ANSWER:g} s")
                rank, values[rank], error = link.recv()
                if error:
                    raise self._failed(f"rank {rank} failed, at {order}: {error}")
        except (OSError, EOFError) as error:
            raise self._failed(f"a rank is gone or hangs, at {order}: {error}") from error
        return values[0]

    def _failed(self, what: str) -> RanksError:
        start = max(0, os.fstat(self._output.fileno()).st_size - _LONGEST_OUTPUT)
        said = os.pread(self._output.fileno(), _LONGEST_OUTPUT, start).decode(errors="replace")
        return RanksError(f"{what}\nThe ranks wrote:\n{said}")


def _end_with_parent() -> None:
    """Runs in the launcher, before its program: whatever kills the benchmark ends the ranks too."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Ranks end when their link is closed; a launcher that has to be killed takes its ranks with it."""
    try:
        launcher.wait(_SECONDS_TO_LEAVE)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def main() -> None:
    """What a rank does: carry out orders until there are no more."""
    # At once: until rank 0 listens, the launcher starts no other rank.
    importlib.import_module("oneflow")
    from libai_data.mesh.peers.liveness import say_farewell
    from tools.benchmarks.deliveries import CONTENDERS

    link, rank = Client(sys.argv[1], "AF_UNIX"), int(os.environ["RANK"])
    opened: dict[str, Any] = {}
    with ExitStack() as stack:
        while True:
            try:
                name, *scale = link.recv()
            except (EOFError, OSError):
                break  # There is no more to do.
            try:
                if scale:
                    opened[name] = stack.enter_context(CONTENDERS[name](*scale))
                link.send((rank, 0.0 if scale else opened[name](), ""))
            except Exception:
                link.send((rank, 0.0, traceback.format_exc()))
                os._exit(1)
    say_farewell()
    sys.stdout.flush()
    # OneFlow's own way out would wait for the other ranks, of which one may have failed.
    os._exit(0)


if __name__ == "__main__":
    main()
