"""Starts a script on every rank of this node: `python -m libai_data.launch --nproc_per_node 4 SCRIPT ARGS...`.

It takes the flags of `oneflow.distributed.launch` and gives the ranks the same environment. On top of that it

* chooses a free `--master_port` when there is one node and none is given;
* starts the other ranks when rank 0 listens: a rank of OneFlow 0.9 that comes first sleeps 10 seconds;
* makes sure that every rank finds the CUDA libraries that OneFlow wants, also in a script that imports OneFlow alone;
* sets ONEFLOW_TIMEOUT_SECONDS to half an hour, where it is not set: OneFlow's own is two hours;
* stops all ranks when one fails, ends with the exit code of the rank that failed first, and prints its error last;
* forwards SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 to all ranks, once; a training that saved on such a signal ends
  with exit code 85, and so does the launcher;
* leaves no rank behind when it is killed itself;
* starts the ranks of all nodes of a `--hostfile`, over ssh; and
* starts all again from the last checkpoint after a failure, `--max-restarts` times.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from libai_data.errors import DataPipelineError
from libai_data.launch.arguments import parse_args
from libai_data.launch.exit_codes import STOPPED
from libai_data.launch.hostfile import read_hostfile
from libai_data.launch.hosts import Hosts
from libai_data.launch.output import STDERR, STDOUT, say
from libai_data.launch.ports import DEFAULT_PORT, FREE_PORTS, free_port
from libai_data.launch.ranks import FORWARDED, Ranks
from libai_data.launch.restarts import JOB_VARIABLE, Restarts, Runner, Training, describe, run_with_restarts

__all__ = ["DEFAULT_PORT", "FORWARDED", "FREE_PORTS", "STOPPED", "free_port", "main", "parse_args"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher and return its exit code: 0, or that of the rank that failed first (128 + N for signal N)."""
    args = parse_args(argv)
    os.environ.setdefault(JOB_VARIABLE, secrets.token_hex(8))
    runner: Runner | None = None
    try:
        hosts = read_hostfile(args.hostfile, args.nproc_per_node) if args.hostfile is not None else []
        training = describe(args, len(hosts) or 1) if args.max_restarts else Training()
        runner = Hosts(args, hosts, training) if hosts else Ranks(args)
        restarts = Restarts(args.max_restarts, training.last_checkpoint)
        return run_with_restarts(runner, args.training_script_args, restarts)
    except (DataPipelineError, OSError) as error:
        say(str(error))
        return 1
    finally:
        for output in (STDOUT, STDERR):
            output.flush(lambda: runner is not None and runner.stopped)
