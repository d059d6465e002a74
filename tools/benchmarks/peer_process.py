"""The process of a peer: started in the environment that has its packages, and told to measure in turn with others."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from libai_data.launch.signals import end_groups
from tools.benchmarks.peer_loaders import PEERS
from tools.benchmarks.rows import Unavailable
from tools.benchmarks.samples import FIELDS
from tools.benchmarks.timing import BATCH, Cost

_ROOT = Path(__file__).resolve().parent.parent.parent
_SECONDS_TO_START, _SECONDS_TO_MEASURE, _SECONDS_TO_END = 240.0, 120.0, 20.0
_LONGEST_OUTPUT = 4000
_VERSIONS = """
import importlib.metadata as metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class PeerError(RuntimeError):
    """A peer failed, or did not answer; the message holds what it wrote."""


def versions(python: str) -> dict[str, str]:
    """Versions of Python and of the peers' packages in an environment, as far as they are installed."""
    packages = [package for _, package in PEERS.values()]
    done = subprocess.run([python, "-c", _VERSIONS, *packages], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def answer_of(python: str, module: str, folder: Path, *arguments: str) -> float:
    """The number that a program of an environment answers, in a line of JSON: {"answer": ...} or {"missing": ...}.

    Args:
        python: interpreter of the environment.
        module: the program; its first argument is the folder, and what it leaves behind is there.
        folder: where it writes.
        arguments: the others.

    Raises:
        Unavailable: Its packages are not installed there.
        PeerError: It failed.
    """
    command = [python, "-m", module, str(folder.resolve()), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "TMPDIR": str(folder.resolve())}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise PeerError(f"{module} ended with {done.returncode}\nIt wrote:\n{done.stderr[-_LONGEST_OUTPUT:]}")
    answer = json.loads(done.stdout)
    if "missing" in answer:
        raise Unavailable(answer["missing"])
    return float(answer["answer"])


class PeerProcess:
    """A loader of `peer_loaders` in a process of its own, which waits between measurements.

    Args:
        python: interpreter of the environment.
        name: of the loader.
        work: which samples it reads.
        folder: where they are.

    Raises:
        Unavailable: Its packages are not installed there.
        PeerError: It failed, or its batches are not those of the others.
    """

    def __init__(self, python: str, name: str, work: str, folder: Path) -> None:
        self._name = f"{name}, at {work},"
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", "tools.benchmarks.peer_loaders", name, work, str(folder.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            cwd=folder,
            # Some packages leave files in the temporary folder.
            env={**os.environ, "PYTHONPATH": str(_ROOT), "TMPDIR": str(folder.resolve())},
            start_new_session=True,
        )
        self.pid = self._process.pid
        try:
            batch = self._answer(_SECONDS_TO_START)["batch"]
            expected = {field: [[BATCH, *shape], dtype] for field, (shape, dtype) in FIELDS[work].items()}
            if batch != expected:
                raise PeerError(f"{self._name} yields {batch}, not {expected}")
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def measure(self, seconds: float) -> Cost:
        """Fetch batches for some seconds."""
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{seconds}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed(f"is gone: {error}") from error
        answer = self._answer(_SECONDS_TO_MEASURE)
        return Cost(answer["seconds"], answer["processor"])

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            raise self._failed(f"did not answer in {seconds:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failed(f"ended with {self._process.wait(_SECONDS_TO_END)}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._failed(f"answers {line!r}") from None
        if "missing" in answer:
            raise Unavailable(answer["missing"])
        if "failed" in answer:
            raise self._failed(f"failed: {answer['failed']}")
        return answer

    def _failed(self, what: str) -> PeerError:
        start = max(0, os.fstat(self._output.fileno()).st_size - _LONGEST_OUTPUT)
        said = os.pread(self._output.fileno(), _LONGEST_OUTPUT, start).decode(errors="replace")
        return PeerError(f"{self._name} {what}\nIt wrote:\n{said}")

    def _end(self) -> None:
        """The process ends when its input does, or is killed; so is what it leaves of its session."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        self._process.kill()
        self._process.wait()
        end_groups([self._process.pid])
        self._process.stdout.close()
        self._output.close()
