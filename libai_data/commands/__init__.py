"""The console command: `libai-data COMMAND ...`, also as `python -m libai_data COMMAND ...`."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple

from libai_data import __version__
from libai_data.errors import ConfigError, nearest
from libai_data.errors.working_directory import working_directory
from libai_data.launch.job_environment import warn_of_mistyped_variables


class Command(NamedTuple):
    """A command: the module whose `main(argv)` runs it, and its line of help."""

    module: str
    summary: str


COMMANDS: dict[str, Command] = {
    "train": Command("libai_data.commands.train", "train or evaluate the model of a config"),
    "launch": Command("libai_data.launch.launcher", "start a program on every rank, on one or several machines"),
    "state": Command("libai_data.commands.state", "show, verify or edit the data state of a checkpoint"),
    "inspect": Command("libai_data.commands.inspect", "show a config's samples, fields and mesh on a page"),
    "profile": Command("libai_data.commands.profile", "measure a config's loader and recommend workers"),
    "convert": Command("libai_data.commands.conversion", "write records of any format as shards of another"),
    "index": Command("libai_data.commands.index", "count the samples of shards, so that trainings can stream them"),
    "preprocess": Command("libai_data.commands.preprocess", "tokenize files of documents into an indexed dataset"),
    "train-tokenizer": Command(
        "libai_data.commands.train_tokenizer", "train a BPE or WordPiece tokenizer on documents"
    ),
    "corpus": Command("libai_data.commands.corpus", "show documents, lengths and duplicates of an indexed dataset"),
    "plan": Command("libai_data.commands.plan", "show what a job on any number of nodes reads, keeps and sends"),
    "doctor": Command("libai_data.commands.doctor", "check every rank of a job before it starts"),
}


def usage() -> str:
    """The commands, a line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: libai-data COMMAND ...", "", *lines, "", "libai-data COMMAND --help shows its options."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with the arguments after its name.

    Args:
        argv: the command's name and its arguments; by default the process's own.

    Returns:
        Exit code of the command, or 0 if it returns no code; 1 if the working directory was deleted; 2 if there is no
        such command. As in a shell, 130 after Ctrl-C, and 141 if nobody reads the rest of the output (`| head -1`).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    try:
        try:
            return _run(name, arguments)
        finally:
            # Here, where a closed pipe can still be handled, and not when Python exits.
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"libai-data {name}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _is_output_closed():
            raise
        # Python flushes stdout again at exit; on the closed pipe, that flush would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE


def _is_output_closed() -> bool:
    """Whether standard output is a pipe that nobody reads."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _run(name: str, arguments: Sequence[str]) -> int:
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"libai-data {__version__}")
        return 0
    if name not in COMMANDS:
        what = f"there is no command {name!r}.{nearest(name, COMMANDS)}" if name else "which command?"
        print(f"libai-data: {what}\n{usage()}", file=sys.stderr)
        return 2
    try:
        working_directory()
    except ConfigError as error:
        print(f"libai-data {name}: {error}", file=sys.stderr)
        return 1
    warn_of_mistyped_variables()
    # argparse shows this as the program's name.
    sys.argv[0] = f"libai-data {name}"
    result = importlib.import_module(COMMANDS[name].module).main(arguments[1:])
    return result if isinstance(result, int) else 0
