"""A crew: ranks that are launched together, and then do what they are told, all the same in the same order."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from libai_data.benchmark.messages import Line

RANK_PROGRAM = "libai_data.benchmark.crew_rank"
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl
_SECONDS_TO_COME = 120.0
_SECONDS_TO_ANSWER = 300.0
_SECONDS_TO_LEAVE = 20.0
_LONGEST_OUTPUT = 4000


class CrewError(RuntimeError):
    """A rank failed, or did not come or answer; the message holds what the ranks wrote."""


class Crew:
    """Ranks on this machine, to be used as a context manager.

    Args:
        ranks: how many.
        program: module that each rank runs, with the address to connect to as its argument.
    """

    def __init__(self, ranks: int, program: str = RANK_PROGRAM) -> None:
        self._ranks = ranks
        self._program = program
        self._lines: list[Line] = []
        self._closing = ExitStack()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def __enter__(self) -> Crew:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="libai_data_crew_"))
            self._output = stack.enter_context(tempfile.TemporaryFile())
            address = str(Path(folder, "meet"))
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(address)
            listener.listen(self._ranks)
            stack.callback(self._end_launcher)
            command = [sys.executable, "-m", "libai_data.launch", "--nproc_per_node", str(self._ranks)]
            self._launcher = subprocess.Popen(
                [*command, "-m", self._program, address],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                preexec_fn=_end_with_parent,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            listener.settimeout(_SECONDS_TO_COME)
            try:
                for _ in range(self._ranks):
                    self._lines.append(stack.enter_context(Line(listener.accept()[0], _SECONDS_TO_ANSWER)))
            except OSError as error:
                raise self._failed(f"{len(self._lines)} of {self._ranks} ranks came: {error}") from error
            self._closing = stack.pop_all()
        return self

    def tell(self, **order: Any) -> Any:
        """Give all ranks an order, and wait until all have carried it out; returns rank 0's answer.

        Raises:
            CrewError: A rank failed.
        """
        answers: dict[int, Any] = {}
        try:
            for line in self._lines:
                line.send(order)
            for line in self._lines:
                answer = line.receive()
                answers[answer["rank"]] = answer
        except (OSError, EOFError) as error:
            raise self._failed(f"a rank is gone or hangs, at {order}: {error}") from error
        for rank, answer in sorted(answers.items()):
            if answer.get("error"):
                raise self._failed(f"rank {rank} failed, at {order}: {answer['error']}")
        return answers[0].get("value")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()
        self._lines.clear()

    def _end_launcher(self) -> None:
        """Ranks end when their line is closed; a launcher that has to be killed takes its ranks with it."""
        if self._launcher is None:
            return
        try:
            self._launcher.wait(_SECONDS_TO_LEAVE)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()

    def _failed(self, what: str) -> CrewError:
        output = self._output
        size = os.fstat(output.fileno()).st_size if output is not None else 0
        start = max(0, size - _LONGEST_OUTPUT)
        said = os.pread(output.fileno(), _LONGEST_OUTPUT, start).decode(errors="replace") if output is not None else ""
        return CrewError(f"{what}\nThe ranks wrote:\n{said}")


def _end_with_parent() -> None:
    """Runs in the launcher, before its program: whatever kills the benchmark ends the ranks too."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class SharedCrew:
    """Keeps a crew from the first use to the end of the last, so that the contenders of a row share one launch.

    Args:
        ranks: how many.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._users = 0
        self._launched = ExitStack()
        self._crew: Crew | None = None

    def __enter__(self) -> Crew:
        if self._crew is None:
            self._crew = self._launched.enter_context(Crew(self._ranks))
        self._users += 1
        return self._crew

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if not self._users:
            self._crew = None
            self._launched.close()
