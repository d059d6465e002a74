"""The command `libai-data index ADDRESS`: count the samples of shards once, so that trainings can stream them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from libai_data.commands.console import print_lines
from libai_data.data.progress_bar import progress_bar
from libai_data.data.sources.opening import open_source
from libai_data.data.sources.remote import is_remote, without_protocol
from libai_data.data.sources.shard_counts import AT_ONCE, STREAMED, counted
from libai_data.data.sources.shard_table import TABLE
from libai_data.errors import ConfigError, StorageError
from libai_data.errors.argument_rules import check, whole


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="libai-data index", description=__doc__)
    arguments.add_argument("folder", help="address of the folder of the shards")
    arguments.add_argument(
        "--format", choices=list(STREAMED), default="", help="format of the shards (default: by file name)"
    )
    arguments.add_argument(
        "--at-once", type=int, default=AT_ONCE, metavar="N", help="requests to the store at once (default: %(default)s)"
    )
    arguments.add_argument(
        "--output",
        metavar="FILE",
        help=f"the table to write (default: {TABLE} in the folder, where trainings look for it)",
    )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Count the samples; returns the exit code: 1 if that failed."""
    asked = parser().parse_args(argv)

    def lines() -> Iterable[str]:
        check({"at_once": whole(1)}, at_once=asked.at_once)
        folder = asked.folder.rstrip("/")
        target = asked.output or f"{folder}/{TABLE}"
        if asked.output and not is_remote(target):
            path = Path(without_protocol(target))
            if path.is_dir() or not path.parent.is_dir():
                raise ConfigError(f"--output is {target!r}; it must be a file in a folder that exists")
        with progress_bar(unit="shard") as bar:

            def report_progress(total: int) -> None:
                bar.total = total
                bar.update()

            table = counted(folder, asked.format, open_source, asked.at_once, report_progress)
        try:
            table.save(target)
        except (ConfigError, StorageError) as error:
            remedy = f"to write the table to this machine, add --output FILE, and then copy FILE to {target}"
            raise type(error)(f"{error}; {remedy}") from error
        yield f"{int(table.samples.sum())} samples in {len(table)} shards of {int(table.sizes.sum())} bytes in all"
        yield f"the table is {target}"

    return print_lines("index", lines)
