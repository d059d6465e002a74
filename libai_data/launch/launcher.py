"""Starts a script on every rank of this node: `python -m libai_data.launch --nproc_per_node 4 SCRIPT ARGS...`.

The script may be a command of `libai-data`: `libai-data launch --nproc_per_node 4 train CONFIG`.

The launcher accepts the flags of `oneflow.distributed.launch`, except `--no_python` and
`--redirect_stdout_and_stderr`, and sets the same environment. In addition, it

* chooses a free `--master_port` if there is one node and no port is given;
* starts the other ranks when rank 0 listens, because a rank of OneFlow 0.9 that starts earlier sleeps 10 seconds;
* lets every rank find the CUDA libraries that OneFlow needs, also in a script that imports OneFlow alone;
* sets ONEFLOW_TIMEOUT_SECONDS to half an hour if it is not set; OneFlow's default is two hours;
* stops all ranks if one fails, exits with the code of the rank that failed first, and prints its error last;
* forwards SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 to all ranks, once; a training that saved on such a signal ends
  with exit code 85, and so does the launcher;
* leaves no rank running if the launcher itself is killed;
* starts the ranks of all nodes of a `--hostfile`, over ssh; and
* after a failure, restarts all ranks from the last checkpoint, at most `--max-restarts` times.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence

from libai_data.atomic_files import output_path
from libai_data.errors import ConfigError, DataPipelineError, naming_open_files, nearest
from libai_data.errors.working_directory import working_directory
from libai_data.launch.exit_codes import STOPPED
from libai_data.launch.hosts import Hosts, read_hostfile
from libai_data.launch.job_environment import warn_of_mistyped_variables
from libai_data.launch.output import STDERR, STDOUT, say
from libai_data.launch.ports import DEFAULT_PORT, FREE_PORTS, check_host, free_port
from libai_data.launch.ranks import FORWARDED, Ranks
from libai_data.launch.restarts import JOB_VARIABLE, Restarts, Runner, Training, describe, run_with_restarts

COMMANDS = {"train": "libai_data.commands.train", "doctor": "libai_data.commands.doctor"}
"""The commands of `libai-data` that run on all ranks, and their modules."""

MOST_NODES, MOST_RANKS_PER_NODE = 100_000, 1024
"""Above the largest jobs. A slip of the keyboard must not start processes until the memory is full."""

__all__ = ["DEFAULT_PORT", "FORWARDED", "FREE_PORTS", "STOPPED", "free_port", "main", "parse_args"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; returns 0, or the exit code of the rank that failed first (128 + N for signal N)."""
    try:
        working_directory()
    except ConfigError as error:
        print(f"libai_data.launch: {error}", file=sys.stderr)
        return 1
    args = parse_args(argv)
    warn_of_mistyped_variables()
    os.environ.setdefault(JOB_VARIABLE, secrets.token_hex(8))
    runner: Runner | None = None
    try:
        hosts = read_hostfile(args.hostfile, args.nproc_per_node) if args.hostfile is not None else []
        training = describe(args, len(hosts) or 1) if args.max_restarts else Training()
        runner = Hosts(args, hosts, training) if hosts else Ranks(args)
        restarts = Restarts(args.max_restarts, training.last_checkpoint)
        with naming_open_files():
            return run_with_restarts(runner, args.training_script_args, restarts)
    except (DataPipelineError, OSError) as error:
        say(str(error))
        return 1
    finally:
        for output in (STDOUT, STDERR):
            output.flush(lambda: runner is not None and runner.stop_signal is not None)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line: the launcher's flags, the script, and the script's arguments.

    If `master_port` is not given, a port is chosen, and `chooses_port` says whether another port may replace it.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.training_script in COMMANDS and not args.module:
        args.training_script, args.module = COMMANDS[args.training_script], True
    _check(parser, args)
    args.chooses_port = args.master_port is None and args.nnodes == 1 and args.hostfile is None
    if args.master_port is None:
        args.master_port = free_port() if args.chooses_port else DEFAULT_PORT
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="libai-data launch", description="Start a script on every rank.")
    parser.add_argument("--nnodes", type=int, default=1, help="number of machines")
    parser.add_argument("--node_rank", type=int, default=0, help="number of this machine, from 0")
    parser.add_argument("--nproc_per_node", type=int, default=1, help="ranks on each machine; one per GPU")
    parser.add_argument(
        "--master_addr", default=None, help="address or host name of machine 0; with --hostfile, by default its first"
    )
    parser.add_argument(
        "--master_port",
        type=int,
        default=None,
        help=f"port on machine 0; by default a free one on a single machine, and {DEFAULT_PORT} on several",
    )
    parser.add_argument(
        "--hostfile",
        default=None,
        metavar="FILE",
        help="start the ranks of the machines in FILE, one per line, by ssh",
    )
    parser.add_argument("--ssh", default="ssh", help="the ssh command, with your own options (default: %(default)s)")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable to send to the machines of --hostfile, in addition to ONEFLOW_*, LIBAI_DATA_*, NCCL_*, "
        "CUDA_*, OMP_*, PYTHONPATH, PYTHONHASHSEED and LD_LIBRARY_PATH; may be given again",
    )
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=0,
        metavar="N",
        help="when a rank or machine fails, stop all and start again with --resume, at most N times",
    )
    parser.add_argument(
        "--stop_grace_seconds",
        type=float,
        default=30.0,
        help="how long ranks may run after SIGINT, SIGTERM or SIGHUP before they are killed; a training "
        "finishes its step and saves in this time",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name, as for python -m")
    parser.add_argument(
        "--logdir",
        type=output_path,
        default="log",
        help="folder of the logs of OneFlow in each rank, relative to the working directory",
    )
    parser.add_argument(
        "training_script",
        help=f"what each rank runs: a script, or a command of libai-data ({', '.join(COMMANDS)}); if a script has the "
        "name of a command, write ./NAME",
    )
    # argparse names it as missing too if the script is missing.
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments").required = False
    return parser


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name, most in (("nnodes", MOST_NODES), ("nproc_per_node", MOST_RANKS_PER_NODE)):
        if not 1 <= getattr(args, name) <= most:
            parser.error(f"--{name} is {getattr(args, name)}; it must be 1 to {most}")
    if not 0 <= args.node_rank < args.nnodes:
        parser.error(f"--node_rank is {args.node_rank}; with --nnodes {args.nnodes} it must be 0 to {args.nnodes - 1}")
    if not 0 <= args.stop_grace_seconds < 1e9:
        parser.error(f"--stop_grace_seconds is {args.stop_grace_seconds}; it must be at least 0, and below 1e9")
    if args.master_port is not None and not 0 < args.master_port < 2**16:
        parser.error(f"--master_port is {args.master_port}; it must be 1 to 65535")
    try:
        check_host("--master_addr", args.master_addr or "")
    except ConfigError as error:
        parser.error(str(error))
    if args.max_restarts < 0:
        parser.error(f"--max-restarts is {args.max_restarts}; it must be at least 0")
    if args.max_restarts and args.nnodes > 1:
        parser.error(
            "--max-restarts needs one launcher that starts all machines: give --hostfile in place of --nnodes, or let "
            "the scheduler start all of them again"
        )
    if args.hostfile is not None and args.nnodes > 1:
        parser.error("--hostfile lists the machines; --nnodes and --node_rank cannot be combined with it")
    for flag, given in (("--ssh", args.ssh != parser.get_default("ssh")), ("--env", args.env)):
        if given and args.hostfile is None:
            parser.error(f"{flag} is for the machines of --hostfile; give both, or neither")
    if not args.module:
        _check_script(parser, args.training_script)


def _check_script(parser: argparse.ArgumentParser, script: str) -> None:
    if os.path.isdir(script):
        parser.error(f"the script {script} is a folder; name a file, or with -m a module or package ({_place()})")
    if not os.path.isfile(script):
        parser.error(f"there is no script {script} ({_place()}).{nearest(script, COMMANDS)}")
    if not os.access(script, os.R_OK):
        parser.error(f"the script {script} may not be read by this user; change its permissions, such as chmod a+r")


def _place() -> str:
    return f"working directory {working_directory()}"
