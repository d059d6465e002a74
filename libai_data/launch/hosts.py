"""Starts all nodes of a hostfile over ssh, prints their output, and stops all nodes if one fails.

Each node is an ssh process. Commands go to its stdin; `node.py` lists them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from libai_data.errors import ConfigError
from libai_data.errors.working_directory import working_directory
from libai_data.launch.exit_codes import STOPPED, as_exit_code, described, distance_from_cause
from libai_data.launch.job_environment import SECRET_VARIABLE
from libai_data.launch.output import OutputPipes, quoted, say, write_to_stderr
from libai_data.launch.parent_pipe import die_with_main_thread
from libai_data.launch.ranks import FAILURE_GRACE_SECONDS, FORWARDED, STOPPING, STOPPING_THE_OTHERS
from libai_data.launch.restarts import Training
from libai_data.launch.same_interpreter import environment


def read_hostfile(path: str, ranks_per_node: int) -> list[str]:
    """Read the machines of a hostfile, each as an argument for ssh: "name" or "user@name".

    Args:
        ranks_per_node: ranks on each machine. If a line has `slots=N`, N must be this number.

    Raises:
        ConfigError: The file cannot be read or names no machine, or a line (named) is malformed or repeats a machine.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} cannot be read: {error}") from error
    hosts: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        target, *slots = words
        if target.startswith("-") or len(slots) > 1 or (slots and not slots[0].startswith("slots=")):
            raise ConfigError(f"{path}, line {number} is {line.strip()!r}; it must be 'HOST' or 'HOST slots=N'")
        if slots and slots[0] != f"slots={ranks_per_node}":
            raise ConfigError(
                f"{path}, line {number} has {slots[0]}, but --nproc_per_node is {ranks_per_node}: each machine gets "
                "the same number of ranks"
            )
        machine = target.rpartition("@")[2]
        if machine in (host.rpartition("@")[2] for host in hosts):
            raise ConfigError(f"{path}, line {number} names {machine} again; write one line for each machine")
        hosts.append(target)
    if not hosts:
        raise ConfigError(f"{path} names no machine; write one machine per line")
    return hosts


_POLL_SECONDS = 0.05
_HEARTBEAT_SECONDS = 2.0
# A node may take so much longer to end than its ranks.
_SECONDS_LATER = 10.0
_SECONDS_TO_ANSWER = 20.0
# A node's launcher writes such a line if one of its ranks fails.
_FAILED = re.compile(rf"libai_data\.launch: local rank [\d -]+ (?:ended with ([^;]+)|waits).*; {STOPPING_THE_OTHERS}")
# What such a line says of ranks that may only have followed another node.
_DISTANCES = {described(code): distance_from_cause(code) for code in (1, -signal.SIGABRT)}
# Of ssh itself, or of the signal that ended it.
_CODES_OF_SSH = (255, *range(-signal.NSIG, 0))
NODE_PROGRAM = "libai_data.launch.node"
TAKEN_ALONG = ("ONEFLOW_", "LIBAI_DATA_", "NCCL_", "CUDA_", "OMP_")
TAKEN_ALONG_WHOLE = ("PYTHONPATH", "LD_LIBRARY_PATH", "PYTHONHASHSEED")
SSH_OPTIONS = {
    # Keys only, because nobody can type a password for every machine.
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    # If a machine does not answer for 15 to 20 s, ssh ends the connection.
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    # Share no connection, so that the connection ends with this process.
    "ControlMaster": "no",
    "ControlPath": "none",
}


class Hosts:
    """Starts the nodes of a job, and again after a failure. The first host is machine 0."""

    def __init__(self, args: argparse.Namespace, hosts: Sequence[str], training: Training) -> None:
        self._args = args
        self._all = list(hosts)
        self._chosen = list(hosts)
        self._training = training
        self._job, self._secret = secrets.token_hex(8), ""
        self._signals: list[int] = []
        self.stop_signal: int | None = None
        for signum in FORWARDED:
            signal.signal(signum, self._receive_signal)

    def choose_again(self) -> str:
        """Choose the largest number of answering machines that the config allows; returns a problem, or ""."""
        answers = [
            subprocess.Popen(
                ssh_command(self._args.ssh, host, "true"), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
            for host in self._all
        ]
        deadline = time.monotonic() + _SECONDS_TO_ANSWER
        while any(each.poll() is None for each in answers) and time.monotonic() < deadline and self.stop_signal is None:
            time.sleep(_POLL_SECONDS)
        answering = [host for host, each in zip(self._all, answers) if each.poll() == 0]
        for each in answers:
            each.kill()
            each.wait()
        silent = ", ".join(host for host in self._all if host not in answering)
        problem = "its mesh is not known, since the script has no --config-file that could be read"
        for count in range(len(answering), 0, -1):
            problem = "" if count == len(self._all) else self._training.problems.get(count, problem)
            if not problem:
                self._chosen = answering[:count]
                if count < len(self._all):
                    names = ", ".join(self._chosen)
                    say(
                        f"no answer from {silent or 'none'}; continues with {count} of {len(self._all)} machines: "
                        f"{names}"
                    )
                return ""
        return f"no answer from {silent}, and the job cannot run on fewer machines: {problem}"

    def run(self, script_args: list[str]) -> int:
        """Start all nodes, and wait for their end; returns the exit code of the node that failed first, else 0."""
        self._first: str | None = None
        self._distance = inf
        self._rests: dict[str, bytes] = {}
        self._told: set[str] = set()  # hosts whose launcher reported a failed rank
        self._secret = secrets.token_hex(16)
        self._nodes: list[RemoteNode] = []
        outputs = OutputPipes(self._print)
        try:
            for rank, host in enumerate(self._chosen):
                self._nodes.append(RemoteNode(host, self._args.ssh, self._order(rank, script_args)))
                outputs.watch(host, self._nodes[-1].output)
            self._watch_nodes(outputs)
        finally:
            for node in self._nodes:
                node.close()
            outputs.empty()
            for name, rest in self._rests.items():
                if rest:
                    self._print(name, b"\n")
        return self._result(outputs)

    def _order(self, rank: int, script_args: list[str]) -> dict[str, object]:
        args = self._args
        arguments = ["--nnodes", len(self._chosen), "--node_rank", rank, "--nproc_per_node", args.nproc_per_node]
        first = self._chosen[0].rpartition("@")[2]
        arguments += ["--master_addr", args.master_addr or first, "--master_port", args.master_port]
        arguments += ["--stop_grace_seconds", args.stop_grace_seconds, "--logdir", args.logdir]
        if args.module:
            arguments.append("--module")
        return {
            "job": self._job,
            "environment": {**taken_along(environment(), args.env), SECRET_VARIABLE: self._secret},
            "arguments": [*map(str, arguments), args.training_script, *script_args],
        }

    def _watch_nodes(self, outputs: OutputPipes) -> None:
        """Send heartbeats and signals to the nodes, until all nodes have ended."""
        beat = 0.0
        kill_at: float | None = None
        has_sent_fail = False
        while any(node.process.poll() is None for node in self._nodes):
            outputs.pump(_POLL_SECONDS)
            now = time.monotonic()
            if now - beat > _HEARTBEAT_SECONDS:
                beat = now
                self._send("alive")
            while self._signals:
                signum = self._signals.pop(0)
                self._send(f"signal {signum}")
                if signum in STOPPING:
                    kill_at = now + self._args.stop_grace_seconds + _SECONDS_LATER
            self._check_who_ended()
            if self._first is not None and not has_sent_fail:
                has_sent_fail = True
                # The node that failed repeats its own error. After "fail", it would not.
                self._send("fail", [node for node in self._nodes if node.name != self._first])
                kill_at = now + FAILURE_GRACE_SECONDS + _SECONDS_LATER
            if kill_at is not None and now > kill_at:
                for node in self._nodes:
                    node.process.kill()

    def _check_who_ended(self) -> None:
        ended = [(node.name, code) for node in self._nodes if (code := node.process.poll()) and code != STOPPED]
        if ended and self._first is None and self.stop_signal is None:
            self._first, code = min(ended, key=lambda each: distance_from_cause(each[1]))
            self._distance = distance_from_cause(code)
            say(f"{self._first}: ended with {described(code)}; stopping the other machines")
        for node in self._nodes:
            if node.process.poll() == 0 and not node.has_left:
                node.has_left = True
                self._send(f"left {node.name}")

    def _send(self, word: str, nodes: Sequence[RemoteNode] | None = None) -> None:
        for node in self._nodes if nodes is None else nodes:
            if node.process.poll() is None:
                node.tell(word)

    def _print(self, name: str, chunk: bytes) -> None:
        *lines, self._rests[name] = (self._rests.get(name, b"") + chunk).split(b"\n")
        for line in lines:
            failed = _FAILED.match(line.decode(errors="replace"))
            # Also after another node was told to stop the others: a node that only follows may be heard first.
            if failed:
                self._told.add(name)
            if failed and (distance := _DISTANCES.get(failed[1], 0)) < self._distance:
                self._first, self._distance = name, distance
        write_to_stderr(name, b"".join(b"[%s] %s\n" % (name.encode(), line) for line in lines))

    def _result(self, outputs: OutputPipes) -> int:
        codes = {node.name: node.process.returncode for node in self._nodes}
        if self._first is None:
            return next((as_exit_code(code) for code in codes.values() if code), 0)
        code = as_exit_code(codes[self._first]) or 1
        lines = outputs.of(self._first)
        if codes[self._first] in _CODES_OF_SSH and self._first not in self._told:
            say(
                f"{self._first} cannot be reached, or the ssh connection was lost (exit code {code}), or the launcher "
                "there was killed"
            )
        if lines and outputs.last_writer != self._first:
            say(f"{self._first} failed first; the end of what it wrote:\n{quoted(lines).rstrip()}")
        return code

    def _receive_signal(self, signum: int, frame: FrameType | None) -> None:
        if signum in STOPPING and self.stop_signal is None:
            self.stop_signal = signum
        self._signals.append(signum)


def ssh_command(ssh: str, host: str, *remote: str) -> list[str]:
    """The command line that runs `remote` on a host. The user's own ssh options come first, so they override ours."""
    options = [word for name, value in SSH_OPTIONS.items() for word in ("-o", f"{name}={value}")]
    return [*shlex.split(ssh), "-T", *options, host, " ".join(map(shlex.quote, remote))]


def taken_along(environment: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The environment variables that are sent to the other machines."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(TAKEN_ALONG) or name in TAKEN_ALONG_WHOLE or name in names
    }


class RemoteNode:
    """The launcher of one node, in the same folder as this process and by the same interpreter."""

    def __init__(self, host: str, ssh: str, order: Mapping[str, Any]) -> None:
        self.name = host
        self.has_left = False
        program = [sys.executable, "-m", NODE_PROGRAM]
        if "PYTHONPATH" in os.environ:
            program = ["env", f"PYTHONPATH={os.environ['PYTHONPATH']}", *program]
        where, what = (" ".join(map(shlex.quote, words)) for words in (["cd", working_directory()], ["exec", *program]))
        self.process = subprocess.Popen(
            [*ssh_command(ssh, host)[:-1], f"{where} && {what}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(die_with_main_thread, os.getpid()),
        )
        assert self.process.stdin is not None and self.process.stdout is not None  # because they are pipes
        self._stdin = self.process.stdin.fileno()
        self.output = os.dup(self.process.stdout.fileno())
        self.process.stdout.close()
        self.tell(json.dumps(order))
        os.set_blocking(self._stdin, False)

    def tell(self, word: str) -> None:
        """Send a command to the launcher of the node; a node that has ended is ignored."""
        with suppress(OSError):
            os.write(self._stdin, f"{word}\n".encode())

    def close(self) -> None:
        """End ssh; then the stdin of the node's launcher closes, and this launcher ends too."""
        self.process.kill()
        self.process.wait()
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
