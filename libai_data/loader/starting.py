"""Starting worker processes: as programs of their own where the dataset can be sent there, else as forks."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from typing import NoReturn

from libai_data.errors import ConfigError, error_text
from libai_data.loader.shipping import Shipment, ship
from libai_data.loader.worker import JOB_VARIABLES, Cargo, Equipment, prepare_process, work
from libai_data.peers.channel import Channel
from libai_data.transforms.batch import rows_together

logger = logging.getLogger(__name__)

START_METHODS = ("auto", "spawn", "fork")

_BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[2]); from libai_data.loader.worker import main; main()"
_SECONDS_TO_END = 2.0
_PICKLED_BYTES_WORTH_A_FORK = 4 * 2**20
_BYTES_OF_OBJECTS_PER_PICKLED_BYTE = 10
_THREADS_OF_LIBRARIES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerStarter:
    """Starts the workers of one loader.

    A program of its own knows nothing of the trainer's threads, nor of OneFlow unless the dataset imports it; it needs
    a dataset that can be pickled. A fork shares the dataset as it is, open files and all, but must not touch OneFlow.

    Args:
        cargo: what the workers need.
        start_method: "spawn", "fork", or "auto": spawn if the dataset can be pickled here and unpickled in the worker,
            and has few Python objects, of which each program would have its own; else fork.

    Raises:
        ConfigError: An unknown method, or "spawn" with a dataset that cannot be pickled.
    """

    def __init__(self, cargo: Cargo, start_method: str) -> None:
        if start_method not in START_METHODS:
            raise ConfigError(f"start_method is {start_method!r}; known are {START_METHODS}")
        self.dataset_name = type(cargo.dataset).__name__
        self.collates = cargo.collator is not None
        self.substitutes = cargo.policy.substitutes
        self.rows_together = rows_together(cargo.batch_transform)
        self._cargo = cargo
        self._method = start_method
        self._shipment: Shipment | None = None
        self._told = False
        if start_method != "fork":
            self._ship()

    def _ship(self) -> None:
        try:
            self._shipment = ship(self._cargo)
        except Exception as error:
            reason = f"{self.dataset_name} cannot be sent to a worker process: {error_text(error)}"
            if not self.fork_instead(reason):
                raise ConfigError(
                    f"{reason}. Open files, connections and locks in the first __getitem__ instead of __init__, or use "
                    "start_method='fork', worker_type='thread' or num_workers=0"
                ) from error
            return
        pickled = self._shipment.pickled_bytes
        if pickled > _PICKLED_BYTES_WORTH_A_FORK:
            megabytes = pickled * _BYTES_OF_OBJECTS_PER_PICKLED_BYTE / 1e6
            self.fork_instead(
                f"{self.dataset_name} has Python objects of about {megabytes:.0f} MB, for each worker anew"
            )

    def fork_instead(self, reason: str) -> bool:
        """Fork workers from now on, if the method is "auto"; returns whether it is.

        Args:
            reason: why they cannot, or should not, be programs of their own.
        """
        if self._method != "auto":
            return False
        if not self._told:
            logger.info("%s. Workers are forked instead; the dataset must not use OneFlow in them.", reason)
            self._told = True
        self.close()
        return True

    def start(self, equipment: Equipment, close_in_child: Channel) -> WorkerProcess:
        """Start a worker.

        Args:
            equipment: its descriptors.
            close_in_child: the trainer's end of its channel.
        """
        # Until the worker ignores Ctrl-C, which is for the trainer, it must not hear of it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            if self._shipment is not None:
                return self._spawn(equipment, self._shipment.descriptor)
            return self._fork(equipment, close_in_child)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _spawn(self, equipment: Equipment, shipped: int) -> WorkerProcess:
        environment = {name: value for name, value in os.environ.items() if name not in JOB_VARIABLES}
        for name in _THREADS_OF_LIBRARIES:
            environment.setdefault(name, "1")
        # With none of their own, the workers of a loader would order sets of strings differently from each other.
        if not environment.get("PYTHONHASHSEED", "").isdigit():
            environment["PYTHONHASHSEED"] = "0"
        inherited = [descriptor for name, descriptor in asdict(equipment).items() if name not in ("number", "workers")]
        arguments = json.dumps([asdict(equipment), shipped])
        program = subprocess.Popen(
            [sys.executable, "-c", _BOOT, arguments, json.dumps(sys.path)],
            pass_fds=[*inherited, shipped],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        return WorkerProcess(program.pid, program)

    def _fork(self, equipment: Equipment, close_in_child: Channel) -> WorkerProcess:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._live_as_fork(equipment, close_in_child)
        return WorkerProcess(pid)

    def _live_as_fork(self, equipment: Equipment, close_in_child: Channel) -> NoReturn:
        try:
            # What the trainer made is never freed here: freeing a OneFlow tensor would wait for threads that a fork
            # lacks.
            gc.freeze()
            close_in_child.close()
            prepare_process(equipment.lifeline)
            work(equipment, self._cargo)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def close(self) -> None:
        """Let go of the shipped dataset."""
        if self._shipment is not None:
            self._shipment.close()
            self._shipment = None


class WorkerProcess:
    """A worker process that this one started.

    Args:
        pid: its process id.
        program: the running program, unless it is a fork.
    """

    def __init__(self, pid: int, program: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._program = program
        self._code: int | None = None

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._poll() is None:
            os.kill(self.pid, number)

    def wait(self) -> str:
        """Wait for the process, which is about to end; returns how it ended, in words."""
        deadline = time.monotonic() + _SECONDS_TO_END
        while self._poll() is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.001)
        code = self._code or 0
        if code >= 0:
            return f"ended with exit code {code}"
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"

    def has_ended(self) -> bool:
        """Whether the process runs no more."""
        return self._poll() is not None

    def _poll(self) -> int | None:
        if self._code is None:
            if self._program is not None:
                self._code = self._program.poll()
            else:
                self._code = _exit_code(self.pid)
        return self._code


def _exit_code(pid: int) -> int | None:
    """The exit code of a child, negative for a signal; None while it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0  # Someone else has waited for it, or this process is a fork of the trainer.
    if not ended:
        return None
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
