"""The ranks of one node: starts them, forwards signals to them, and ends them together."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from libai_data.errors import ConfigError, numbers_in_words
from libai_data.errors.working_directory import working_directory
from libai_data.launch.cuda_libraries import library_path_for_ranks
from libai_data.launch.exit_codes import STOPPED, as_exit_code, described, distance_from_cause
from libai_data.launch.job_environment import SECONDS_TO_JOIN_VARIABLE, SECRET_VARIABLE, seconds_to_join
from libai_data.launch.joining_pipe import GRACE_SECONDS, JoiningRanks
from libai_data.launch.output import OutputPipes, quoted, say
from libai_data.launch.parent_pipe import die_with_main_thread
from libai_data.launch.ports import free_port, machines_connected_to, refuse_one_machine, reserve_port
from libai_data.launch.same_interpreter import environment
from libai_data.launch.signals import end_groups, signals_blocked

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How long ranks may take to end, after one rank failed.
FAILURE_GRACE_SECONDS = 5.0
# On rank 0's node, the other ranks start after this time at the latest. A script may import OneFlow late, or never.
LISTEN_SECONDS = 10.0
# How long a rank of OneFlow waits in a collective for a missing rank. OneFlow's default is 7200 s. Half an hour is
# still longer than a rank needs to write a checkpoint or to sum up a large evaluation alone.
ONEFLOW_TIMEOUT_SECONDS = 1800
POLL_SECONDS = 0.02
# The launcher reports an ended rank after this time: other ranks may wait for it, or may finish without it.
SECONDS_UNTIL_TOLD = 10.0
STOPPING_THE_OTHERS = "stopping the others"
"""In each line that reports a failure, and in no other line. The launcher of a hostfile looks for these words."""


def rank_environment(args: argparse.Namespace, local_rank: int, library_path: str | None) -> dict[str, str]:
    """Return the environment of one rank, as `oneflow.distributed.launch` sets it, with a shorter time-out."""
    # All ranks and workers iterate over sets of strings in the same order, in every run.
    env = environment()
    env.setdefault("ONEFLOW_TIMEOUT_SECONDS", str(ONEFLOW_TIMEOUT_SECONDS))
    if args.nproc_per_node > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    if library_path is not None:
        env["LD_LIBRARY_PATH"] = library_path
    env.update(
        MASTER_ADDR=args.master_addr or "127.0.0.1",
        MASTER_PORT=str(args.master_port),
        WORLD_SIZE=str(args.nproc_per_node * args.nnodes),
        RANK=str(args.nproc_per_node * args.node_rank + local_rank),
        LOCAL_RANK=str(local_rank),
        GLOG_log_dir=str(_log_folder(args, local_rank)),
    )
    return env


def _log_folder(args: argparse.Namespace, local_rank: int) -> Path:
    folder = Path(working_directory()) / args.logdir / f"local_rank_{local_rank}"
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        # OneFlow would raise a UnicodeEncodeError in each rank.
        raise ConfigError(
            f"OneFlow cannot write logs to {str(folder)!r}, because the path is not UTF-8; give --logdir another folder"
        ) from None
    return folder


class Ranks:
    """Starts the ranks of this node, and again after a failure.

    If `controlled`, another launcher reads the output and sends commands to stdin. Then the ranks get neither directly.
    """

    def __init__(self, args: argparse.Namespace, controlled: bool = False) -> None:
        self._args = args
        self._controlled = controlled
        self.stop_signal: int | None = None
        # Other threads may set these, too.
        self.failed_elsewhere = False  # another node has failed, so the ranks must stop
        self.left_elsewhere = ""  # another machine, all of whose ranks have ended with exit code 0
        self._launcher_pid = os.getpid()
        self._prepare_run()
        for signum in FORWARDED:
            signal.signal(signum, self._forward)

    def run(self, script_args: list[str]) -> int:
        """Start all ranks, and wait until all have ended; returns the exit code of the rank that failed first, or 0.

        Raises ConfigError if the port of rank 0 is in use, or two nodes would run on one machine.
        """
        args = self._args
        refuse_one_machine(args.nnodes, args.node_rank, args.master_addr)
        with contextlib.ExitStack() as reserved:
            if args.node_rank == 0:
                reserved.enter_context(self._reserve_port())
            return self._run(script_args)

    def _reserve_port(self) -> socket.socket:
        while True:
            try:
                return reserve_port(self._args.master_port)
            except ConfigError:
                if not self._args.chooses_port:
                    raise
                self.choose_again()

    def _prepare_run(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._kill_at: float | None = None
        self._kill_joining_at: float | None = None
        self._report_at: float | None = None
        self._check_at = 0.0
        self._seen_waiting: list[int] = []
        self._joining = JoiningRanks()
        self._outputs = OutputPipes(terminals=not self._controlled)

    def _run(self, script_args: list[str]) -> int:
        self._prepare_run()
        try:
            self._start(script_args)
            return self._wait()
        finally:
            # Processes that a rank started and did not end, such as workers, are in the rank's process group.
            self.kill()
            self._outputs.empty()
            self._joining.close()

    def choose_again(self) -> str:
        """Choose another port for the next run, if the user gave none."""
        if self._args.chooses_port:
            self._args.master_port = free_port()
        return ""

    def kill(self) -> None:
        """Kill the ranks and the processes that they started. May be called from any thread."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        end_groups([process.pid for process in self.processes])

    def _start(self, script_args: list[str]) -> None:
        """Start all ranks, rank 0 first. After a signal to stop or a failure, no more ranks are started."""
        args = self._args
        library_path = library_path_for_ranks()
        # On several machines, the launcher of the hostfile, or the user, gives all launchers the same secret.
        secret = {SECRET_VARIABLE: secrets.token_hex(16)} if args.nnodes == 1 else {}
        for local_rank in range(args.nproc_per_node):
            if args.node_rank + local_rank > 0 and local_rank <= 1:
                self._wait_for_rank_0()
            if self.stop_signal or self.failed_elsewhere or any(process.poll() for process in self.processes):
                break
            self._start_one(local_rank, script_args, {**rank_environment(args, local_rank, library_path), **secret})

    def _start_one(self, local_rank: int, script_args: list[str], env: dict[str, str]) -> None:
        args = self._args
        command = [sys.executable, "-u", *(["-m"] if args.module else []), args.training_script, *script_args]
        stdin = subprocess.DEVNULL if self._controlled else None
        # A signal between the start of a process and its entry in `processes` would not be forwarded to it.
        with signals_blocked(FORWARDED):
            stderr = self._outputs.open(str(local_rank))
            stdout = stderr if self._controlled else self._outputs.open(None)
            joining = self._joining.add()
            try:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env={**env, **joining.environment},
                        stdin=stdin,
                        stdout=stdout,
                        stderr=stderr,
                        preexec_fn=self._prepare,
                        pass_fds=[joining.inherited],
                    )
                )
            finally:
                joining.started()
                for descriptor in {stdout, stderr}:
                    os.close(descriptor)

    def _wait_for_rank_0(self) -> None:
        """Wait until rank 0 listens. On rank 0's node a time-out is no error: the script may import OneFlow late."""
        args = self._args
        seconds = seconds_to_join() if args.node_rank else LISTEN_SECONDS
        where = (args.master_addr or "127.0.0.1", args.master_port)
        deadline = time.monotonic() + seconds
        problem: OSError | None = None
        while time.monotonic() < deadline:
            # If another machine has left, rank 0 may never listen. Then the ranks start, and find out.
            has_ended = self.stop_signal or self.failed_elsewhere or self.left_elsewhere
            if has_ended or any(each.poll() is not None for each in self.processes):
                return
            try:
                socket.create_connection(where, timeout=1).close()
                return
            except OSError as error:
                problem = error
                self._outputs.pump(POLL_SECONDS)
        if args.node_rank:
            raise TimeoutError(
                f"rank 0 did not listen on {where[0]} port {where[1]} within {seconds:g} s ({problem}): was machine 0 "
                "started, with the same --master_addr and --master_port, and does its firewall allow the connection?"
            )

    def _wait(self) -> int:
        """Wait until every rank has ended; returns the exit code of the rank that failed first, else 0."""
        first: tuple[int, int] | None = None
        is_stopping = False
        while True:
            codes = [process.poll() for process in self.processes]
            if first is None:
                failed = [(rank, code) for rank, code in enumerate(codes) if code]
                first = min(failed, key=lambda each: distance_from_cause(each[1]), default=None)
                missed = self._joining.missed(codes)
                if first is None and missed is not None:
                    first = (missed, 0)
                if first is None and self.left_elsewhere and self._joining.misses_machine(codes):
                    first = (self._joining.waiting(codes)[0], 0)
                if first is not None:
                    self._report(*first)
            if not is_stopping and (first is not None or self.failed_elsewhere):
                is_stopping = True
                self._signal_all(signal.SIGTERM)
                self._kill_within(FAILURE_GRACE_SECONDS)
            if None not in codes:
                break
            if not is_stopping:
                self._report_ended_and_stopped(codes)
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self.kill()
            if self._kill_joining_at is not None and time.monotonic() > self._kill_joining_at:
                for rank in self._joining.waiting(codes):
                    self.processes[rank].kill()
            self._outputs.pump(POLL_SECONDS)
        if first is not None:
            self.kill()
            self._outputs.empty()
            self._report_last(*first)
        code = (first[1] or 1) if first is not None else 0
        if not self.processes and self.stop_signal is not None:
            code = -self.stop_signal
        return as_exit_code(code)

    def _report_ended_and_stopped(self, codes: Sequence[int | None]) -> None:
        """Report once if ranks have ended without a failure while others run, and if a rank was stopped."""
        for local_rank, process in enumerate(self.processes):
            with contextlib.suppress(ChildProcessError):
                if os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG):
                    say(
                        f"local rank {local_rank} is stopped, and other ranks may wait for it; to continue it: kill "
                        f"-CONT {process.pid}"
                    )
        if self._args.nnodes > 1:
            self._report_missing_machines(codes)
        if self._report_at is None and 0 in codes:
            self._report_at = time.monotonic() + SECONDS_UNTIL_TOLD
        elif self._report_at is not None and time.monotonic() > self._report_at:
            self._report_at = math.inf
            say(f"{_ended(codes)}, at least {SECONDS_UNTIL_TOLD:g} s ago; the others still run")

    def _report_missing_machines(self, codes: Sequence[int | None]) -> None:
        """Report once that ranks wait in `import oneflow` for other machines, and which machines have connected."""
        if time.monotonic() < self._check_at:
            return
        args, waiting = self._args, self._joining.waiting(codes)
        self._check_at = time.monotonic() + SECONDS_UNTIL_TOLD
        self._seen_waiting, again = waiting, bool(waiting) and waiting == self._seen_waiting
        if not again:
            return
        self._check_at = math.inf
        have_come = ""
        if args.node_rank == 0:
            machines = machines_connected_to(args.master_port)
            have_come = f"; connected so far: {', '.join(machines) or 'none'}"
        say(
            f"local rank {numbers_in_words(waiting)} waits in 'import oneflow' for ranks of the other "
            f"{args.nnodes - 1} machine(s){have_come}. Each machine needs a launcher that runs, with the same "
            f"--master_addr and --master_port; {SECONDS_TO_JOIN_VARIABLE} sets how long to wait"
        )

    def _prepare(self) -> None:
        """Runs in the new process of a rank, before the rank's program."""
        die_with_main_thread(self._launcher_pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        if signum in STOPPING:
            if self.stop_signal is not None:
                self._kill_at = time.monotonic()
                return
            self.stop_signal = signum
            self._kill_within(self._args.stop_grace_seconds)
            self._kill_joining_at = time.monotonic() + GRACE_SECONDS
        self._signal_all(signum)

    def _kill_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def _signal_all(self, signum: int) -> None:
        # Signal only the ranks, not their workers: each rank ends its own workers.
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signum)

    def _is_failure(self, code: int) -> bool:
        return self.stop_signal is None and not self.failed_elsewhere and code != STOPPED

    def _report(self, local_rank: int, code: int) -> None:
        if self._is_failure(code):
            codes = [process.returncode for process in self.processes]
            if code == 0 and codes[local_rank] is None:
                say(
                    f"local rank {numbers_in_words(self._joining.waiting(codes))} waits in 'import oneflow' for "
                    f"{self.left_elsewhere}, whose ranks ended with exit code 0 and never imported oneflow; "
                    f"{STOPPING_THE_OTHERS}"
                )
                return
            if code == 0:
                say(
                    f"local rank {local_rank} ended with exit code 0 and never imported oneflow; in 'import oneflow', "
                    f"local rank {numbers_in_words(self._joining.waiting(codes))} waits for it; {STOPPING_THE_OTHERS}"
                )
                return
            before = f" ({_ended(codes)} before)" if 0 in codes else ""
            say(f"local rank {local_rank} ended with {described(code)}; {STOPPING_THE_OTHERS}{before}")

    def _report_last(self, local_rank: int, code: int) -> None:
        """Repeat the last output of the rank that failed first, if other ranks have written since."""
        if not code or not self._is_failure(code) or self._outputs.last_writer in (None, str(local_rank)):
            return
        rank = self._args.nproc_per_node * self._args.node_rank + local_rank
        lines = self._outputs.of(str(local_rank))
        how = f"rank {rank} (local rank {local_rank}) failed first, with {described(code)}"
        say(f"{how}; the end of what it wrote:\n{quoted(lines).rstrip()}" if lines else f"{how}, and wrote nothing")


def _ended(codes: Sequence[int | None]) -> str:
    return (
        f"local rank {numbers_in_words([rank for rank, code in enumerate(codes) if code == 0])} ended with exit code 0"
    )
