"""The processes that tokenize: programs of their own, each fed over a pipe, which die with the one that feeds them."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Deque, Dict, Iterable, Iterator, List, Optional, Tuple

from libai_data.errors import DataPipelineError
from libai_data.loader.lifeline import Lifeline, hold_on
from libai_data.text.parts import Part
from libai_data.text.shards import ShardReport, Task, write_shard

Shard = Tuple[Part, ShardReport]

_PARTS_AHEAD = 2
_ATTEMPTS = 3


class TokenizingError(DataPipelineError, RuntimeError):
    """A process could not tokenize a part of a corpus."""


def tokenize_parts(folder: Path, parts: Iterable[Part], task: Task, workers: int) -> Iterator[Shard]:
    """Write the shard of each part.

    Args:
        folder: of the shards.
        parts: taken as they are needed.
        task: how.
        workers: processes; 0 does it in this one.

    Returns:
        Each part with what became of it, as they are finished.

    Raises:
        TokenizingError: A process failed over a part, or died over it again and again.
    """
    if not workers:
        tokenizer = task.tokenizer.load()
        for part in parts:
            yield part, write_shard(folder, part, task, tokenizer)
        return
    yield from _with_processes(folder, parts, task, workers)


def _with_processes(folder: Path, parts: Iterable[Part], task: Task, workers: int) -> Iterator[Shard]:
    crew = _Crew(folder, task)
    pending: Deque[Tuple[Part, Future[ShardReport]]] = deque()
    remaining = iter(parts)
    # A thread waits for each process; the work itself is not done in this one.
    with ThreadPoolExecutor(workers, thread_name_prefix="tokenizing") as threads:
        try:
            for part in remaining:
                pending.append((part, threads.submit(crew.tokenize, part)))
                if len(pending) >= workers * _PARTS_AHEAD:
                    yield from _finished(pending)
            while pending:
                yield from _finished(pending)
        finally:
            for _, future in pending:
                future.cancel()
            crew.close()


def _finished(pending: Deque[Tuple[Part, Future[ShardReport]]]) -> Iterator[Shard]:
    """The first pending part, once it is finished, and others that are finished by then."""
    part, future = pending.popleft()
    yield part, future.result()
    done = [entry for entry in pending if entry[1].done()]
    for entry in done:
        pending.remove(entry)
    for part, future in done:
        yield part, future.result()


class _Crew:
    """One process for each thread that asks for the tokens of a part."""

    def __init__(self, folder: Path, task: Task) -> None:
        self._work = {"folder": folder, "task": task}
        self._lifeline = Lifeline()
        self._own = threading.local()
        self._all: List[subprocess.Popen[bytes]] = []
        self._closed = False
        self._guard = threading.Lock()

    def tokenize(self, part: Part) -> ShardReport:
        """Write the shard of a part; a process that dies over it is replaced, a few times."""
        died = 0
        while True:
            process = self._process()
            try:
                pickle.dump(part, _pipe(process.stdin))
                _pipe(process.stdin).flush()
                answer = pickle.load(_pipe(process.stdout))
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                code = self._end(process)
                self._own.process = None
                died += 1
                if self._closed:
                    raise TokenizingError("tokenizing was ended") from error
                if died == _ATTEMPTS:
                    raise TokenizingError(
                        f"{died} processes died over part {part.number} ({names_of_files(part)}), the last with exit "
                        f"code {code}; is there enough memory? What is finished is kept: run the same again"
                    ) from error
                continue
            if isinstance(answer, ShardReport):
                return answer
            raise TokenizingError(f"part {part.number} ({names_of_files(part)}) failed:\n{answer}")

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        with self._guard:
            self._closed = True
            for process in self._all:
                process.kill()
        for process in self._all:
            self._end(process)
        self._lifeline.close()

    def _process(self) -> subprocess.Popen[bytes]:
        found: Optional[subprocess.Popen[bytes]] = getattr(self._own, "process", None)
        if found is None:
            with self._guard:
                if self._closed:
                    raise TokenizingError("tokenizing was ended")
                found = _start(self._lifeline)
                self._all.append(found)
            self._own.process = found
            pickle.dump(self._work, _pipe(found.stdin))
        return found

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> int:
        process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            # What was never sent cannot be sent any more.
            with contextlib.suppress(OSError):
                _pipe(pipe).close()
        return code


def _start(lifeline: Lifeline) -> subprocess.Popen[bytes]:
    # The tokenizers' own threads would make each process take all cores.
    environment: Dict[str, str] = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    program = "import sys; sys.path[:] = {!r}; from libai_data.text.crew import serve; serve({})"
    return subprocess.Popen(
        [sys.executable, "-c", program.format(sys.path, lifeline.descriptor)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(lifeline.descriptor,),
        env=environment,
        start_new_session=True,
    )


def _pipe(pipe: Any) -> Any:
    return pipe


def names_of_files(part: Part) -> str:
    """The files of a part, the first few of them."""
    names = list(dict.fromkeys(piece.path for piece in part.pieces))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def serve(lifeline: int) -> None:
    """Tokenize the parts that arrive on standard input, until it ends.

    Args:
        lifeline: descriptor of the `Lifeline` of the process that sends them.
    """
    import traceback

    hold_on(lifeline)
    answers = os.fdopen(os.dup(1), "wb")
    # Whatever a library prints must not end up among the answers.
    os.dup2(2, 1)
    work = pickle.load(sys.stdin.buffer)
    tokenizer = None
    while True:
        try:
            part = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            tokenizer = tokenizer or work["task"].tokenizer.load()
            answer: Any = write_shard(work["folder"], part, work["task"], tokenizer)
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()
