"""The launcher of one node of a hostfile: `python -m libai_data.launch.node`, started by `hosts.py` through ssh.

It reads commands from stdin. The first line is JSON: {"job": NAME, "environment": {...}, "arguments": [...]}. Each
further line is one of these: "alive", every two seconds; "signal N", to forward to the ranks; "left NAME", when another
node has ended without a failure; "fail", when another node has failed. If stdin closes, or is silent for too long, the
launcher that started the job is gone, and the ranks are stopped.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import threading
import time

from libai_data.launch.launcher import parse_args
from libai_data.launch.output import STDERR, say
from libai_data.launch.ports import process_at
from libai_data.launch.ranks import Ranks

SECONDS_OF_SILENCE = 20.0
_SECONDS_LATER_THAN_GRACE = 5.0
_SECONDS_FOR_PREDECESSOR = 120.0


def obey(descriptor: int, ranks: Ranks, grace_seconds: float) -> None:
    """Run the commands that arrive at stdin. If it closes or is silent, the ranks get `grace_seconds` to end."""
    rest = b""
    while select.select([descriptor], [], [], SECONDS_OF_SILENCE)[0]:
        chunk = os.read(descriptor, 4096)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for word in map(bytes.decode, lines):
            if word.startswith("signal "):
                # Send the signal to this process; the handler in the main thread forwards the signal to the ranks.
                os.kill(os.getpid(), int(word.split()[1]))
            elif word == "fail":
                ranks.failed_elsewhere = True
            elif word.startswith("left "):
                ranks.left_elsewhere = word[len("left ") :]
    os.kill(os.getpid(), signal.SIGTERM)
    # The main thread may block in a write to a pipe that nobody reads.
    time.sleep(grace_seconds + _SECONDS_LATER_THAN_GRACE)
    ranks.kill()
    os._exit(1)


def read_order(descriptor: int) -> bytes:
    """Read the first line, and no byte after it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return line


def wait_for_predecessor(job: str) -> socket.socket:
    """Wait until an earlier run of the same job has ended on this machine; a TimeoutError after two minutes.

    The returned socket has the name of the job until this process ends. The next run waits for this name.
    """
    name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # With the user's id, so that jobs of the same name of two users do not wait for each other.
    wanted = f"\0libai_data.launch/{os.getuid()}/{job}"
    deadline, has_told = time.monotonic() + _SECONDS_FOR_PREDECESSOR, False
    while True:
        try:
            name.bind(wanted)
            name.listen()
            return name
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            is_late = time.monotonic() > deadline
            if is_late or not has_told:
                held = f"process {process_at(wanted) or 'unknown'} uses the socket name @{wanted[1:]}"
            if is_late:
                raise TimeoutError(f"an earlier run of this job has not ended on this machine ({held})") from error
            if not has_told:
                say(f"waiting up to {_SECONDS_FOR_PREDECESSOR:.0f} s for an earlier run of this job to end ({held})")
            has_told = True
            time.sleep(0.05)


def main() -> int:
    """Start the ranks of the order; returns the exit code of the rank that failed first, or 0."""
    # If ssh ended before the order came, there is no job.
    order = read_order(0)
    if not order:
        return 1
    stdin = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        wanted = json.loads(order)
    except ValueError:
        got = order.decode(errors="replace").strip()
        say(f"got {got!r:.200} instead of its order: the login shell of this machine reads stdin, which it must not")
        return 1
    os.environ.update(wanted["environment"])
    args = parse_args(wanted["arguments"])
    ranks = Ranks(args, controlled=True)
    commands = (stdin, ranks, args.stop_grace_seconds)
    threading.Thread(target=obey, args=commands, name="stdin of the launcher", daemon=True).start()
    try:
        with wait_for_predecessor(wanted["job"]):
            return ranks.run(args.training_script_args)
    except (OSError, ValueError) as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    code = main()
    STDERR.flush()
    # Do not wait for the thread that reads stdin.
    os._exit(code)
