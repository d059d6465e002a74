"""Starts a script on every rank of this node: `python -m libai_data.launch --nproc_per_node 4 SCRIPT ARGS...`.

It takes the flags of `oneflow.distributed.launch` and gives the ranks the same environment. On top of that it

* chooses a free `--master_port` when there is one node and none is given;
* starts the other ranks when rank 0 listens: a rank of OneFlow 0.9 that comes first sleeps 10 seconds;
* makes sure that every rank finds the CUDA libraries that OneFlow wants, also in a script that imports OneFlow alone;
* stops all ranks when one fails, and ends with the exit code of the rank that failed first;
* forwards SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 to all ranks, once; a training that saved on such a signal ends
  with exit code 85, and so does the launcher; and
* leaves no rank behind when it is killed itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import IO, Dict, List, Optional, Sequence

from libai_data.cuda_libraries import library_path_for_ranks

DEFAULT_PORT = 29500
# Below the ports that Linux hands out to clients, so that none of them takes it before rank 0 listens.
FREE_PORTS = range(15000, 32000)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A rank's exit code for "I was told to stop, and have saved": run the same command again to go on.
STOPPED = 85
# How long ranks may take to end, after one failed.
FAILURE_GRACE_SECONDS = 5.0
# How long the other ranks wait for rank 0 to listen. A script may never import OneFlow, or late.
LISTEN_SECONDS = 10.0
POLL_SECONDS = 0.02
PR_SET_PDEATHSIG = 1


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Read the command line: the flags of `oneflow.distributed.launch`, the script, and the script's arguments."""
    parser = argparse.ArgumentParser(prog="libai-data launch", description="Start a script on every rank.")
    parser.add_argument("--nnodes", type=int, default=1, help="number of machines")
    parser.add_argument("--node_rank", type=int, default=0, help="which of the machines this is, from 0")
    parser.add_argument("--nproc_per_node", type=int, default=1, help="ranks on this machine; one per GPU")
    parser.add_argument("--master_addr", default="127.0.0.1", help="address or host name of machine 0")
    parser.add_argument(
        "--master_port",
        type=int,
        default=None,
        help=f"port on machine 0; by default a free one on a single machine, and {DEFAULT_PORT} on several",
    )
    parser.add_argument(
        "--stop_grace_seconds",
        type=float,
        default=30.0,
        help="how long ranks may take to end after SIGINT, SIGTERM or SIGHUP before they are killed; a training "
        "finishes its step and saves in this time",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name, as for python -m")
    parser.add_argument("--no_python", action="store_true", help="the script is a program, started without python")
    parser.add_argument(
        "--redirect_stdout_and_stderr",
        action="store_true",
        help="write each rank's output to LOGDIR/local_rank_N/stdout and stderr",
    )
    parser.add_argument("--logdir", default="log", help="folder of the ranks' logs, relative to the working directory")
    parser.add_argument("training_script", help="what each rank runs")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    args = parser.parse_args(argv)
    _check(parser, args)
    if args.master_port is None:
        args.master_port = free_port() if args.nnodes == 1 else DEFAULT_PORT
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.nnodes < 1:
        parser.error(f"--nnodes is {args.nnodes}; it must be at least 1")
    if not 0 <= args.node_rank < args.nnodes:
        parser.error(f"--node_rank is {args.node_rank}; with --nnodes {args.nnodes} it must be 0 to {args.nnodes - 1}")
    if args.nproc_per_node < 1:
        parser.error(f"--nproc_per_node is {args.nproc_per_node}; it must be at least 1")
    if not args.stop_grace_seconds >= 0:
        parser.error(f"--stop_grace_seconds is {args.stop_grace_seconds}; it must be at least 0")
    if args.master_port is not None and not 0 < args.master_port < 2**16:
        parser.error(f"--master_port is {args.master_port}; it must be 1 to 65535")
    if args.module and args.no_python:
        parser.error("--module and --no_python exclude each other; give one of them")
    if not args.module and not args.no_python and not Path(args.training_script).is_file():
        parser.error(f"there is no script {args.training_script} (working directory {os.getcwd()})")


def free_port() -> int:
    """Return a TCP port that nothing on this machine listens on."""
    for port in random.SystemRandom().sample(FREE_PORTS, 200):
        with socket.socket() as candidate:
            try:
                candidate.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among 200 tried of {FREE_PORTS.start} to {FREE_PORTS.stop - 1}; give --master_port")


def rank_environment(args: argparse.Namespace, local_rank: int, library_path: Optional[str]) -> Dict[str, str]:
    """Return the environment of one rank, as `oneflow.distributed.launch` sets it."""
    env = dict(os.environ)
    if args.nproc_per_node > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    if library_path is not None:
        env["LD_LIBRARY_PATH"] = library_path
    env.update(
        MASTER_ADDR=args.master_addr,
        MASTER_PORT=str(args.master_port),
        WORLD_SIZE=str(args.nproc_per_node * args.nnodes),
        RANK=str(args.nproc_per_node * args.node_rank + local_rank),
        LOCAL_RANK=str(local_rank),
        GLOG_log_dir=str(_log_folder(args, local_rank)),
    )
    return env


def _log_folder(args: argparse.Namespace, local_rank: int) -> Path:
    return Path.cwd() / args.logdir / f"local_rank_{local_rank}"


class Ranks:
    """The ranks of this node: starts them, passes signals on to them, and sees to it that they all end."""

    def __init__(self, stop_grace_seconds: float) -> None:
        self._stop_grace_seconds = stop_grace_seconds
        self.processes: List[subprocess.Popen[bytes]] = []
        self.stop_signal: Optional[int] = None
        self._kill_at: Optional[float] = None
        self._files: List[IO[bytes]] = []
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._launcher_pid = os.getpid()

    def start(self, args: argparse.Namespace) -> None:
        """Start all ranks, rank 0 first. After a signal to stop, or when rank 0 fails at once, no more are started."""
        library_path = library_path_for_ranks()
        for signum in FORWARDED:
            signal.signal(signum, self._forward)
        try:
            for local_rank in range(args.nproc_per_node):
                if args.node_rank + local_rank > 0 and local_rank <= 1:
                    self._wait_for_rank_0(args)
                if self.stop_signal is not None or any(process.poll() for process in self.processes):
                    break
                self._start_one(args, local_rank, rank_environment(args, local_rank, library_path))
        except BaseException:
            self._kill()
            raise

    def _start_one(self, args: argparse.Namespace, local_rank: int, env: Dict[str, str]) -> None:
        command = [] if args.no_python else [sys.executable, "-u", *(["-m"] if args.module else [])]
        command += [args.training_script, *args.training_script_args]
        stdout, stderr = self._output(args, local_rank)
        # A signal to forward must not come between the start of a process and its being known.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            self.processes.append(
                subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr, preexec_fn=self._prepare)
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _wait_for_rank_0(self, args: argparse.Namespace) -> None:
        """Wait until rank 0 listens, but only so long: its script may do something else before it imports OneFlow."""
        deadline = time.monotonic() + LISTEN_SECONDS
        while time.monotonic() < deadline and self.stop_signal is None:
            if any(process.poll() is not None for process in self.processes):
                return
            try:
                socket.create_connection((args.master_addr, args.master_port), timeout=1).close()
                return
            except OSError:
                time.sleep(POLL_SECONDS)

    def wait(self) -> int:
        """Wait until every rank has ended. Returns the exit code of the first that failed, else 0."""
        failed: Optional[int] = None
        while True:
            codes = [process.poll() for process in self.processes]
            if failed is None:
                failed = next((code for code in codes if code), None)
                if failed is not None:
                    self._report(codes.index(failed), failed)
                    self._signal_all(signal.SIGTERM)
                    self._kill_within(FAILURE_GRACE_SECONDS)
            if None not in codes:
                break
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self._kill()
            time.sleep(POLL_SECONDS)
        # What a rank started and did not end, such as its readers, is in the rank's process group.
        self._kill()
        for file in self._files:
            file.close()
        code = failed or 0
        if not self.processes and self.stop_signal is not None:
            code = -self.stop_signal
        return code if code >= 0 else 128 - code

    def _prepare(self) -> None:
        """Runs in the rank, before its program."""
        # Ctrl-C on a terminal reaches the terminal's process group: the launcher, which passes it on once.
        os.setpgid(0, 0)
        # Whatever kills the launcher ends its ranks.
        self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._launcher_pid:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)

    def _output(self, args: argparse.Namespace, local_rank: int) -> Sequence[Optional[IO[bytes]]]:
        if not args.redirect_stdout_and_stderr:
            return None, None
        folder = _log_folder(args, local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        files = [(folder / name).open("wb") for name in ("stdout", "stderr")]
        self._files += files
        return files

    def _forward(self, signum: int, frame: Optional[FrameType]) -> None:
        if signum in STOPPING:
            if self.stop_signal is not None:
                self._kill_at = time.monotonic()
                return
            self.stop_signal = signum
            self._kill_within(self._stop_grace_seconds)
        self._signal_all(signum)

    def _kill_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def _signal_all(self, signum: int) -> None:
        # To the ranks alone: each knows what its readers have to do.
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signum)

    def _kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _report(self, local_rank: int, code: int) -> None:
        if self.stop_signal is None and code != STOPPED:
            how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
            print(f"libai_data.launch: local rank {local_rank} ended with {how}; stopping the others", file=sys.stderr)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the launcher and return its exit code: 0, or that of the rank that failed first (128 + N for signal N)."""
    args = parse_args(argv)
    ranks = Ranks(args.stop_grace_seconds)
    ranks.start(args)
    return ranks.wait()


if __name__ == "__main__":
    sys.exit(main())
