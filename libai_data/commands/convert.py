"""The command: `libai-data convert 'data/*.tar' --to array_record --output data/records`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from tqdm import tqdm

from libai_data.commands.console import print_lines
from libai_data.commands.conversion.conversion import Conversion, convert
from libai_data.commands.conversion.shard_writers import FORMATS
from libai_data.data.sources.opening import SOURCES


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="libai-data convert", description=__doc__)
    arguments.add_argument("source", nargs="+", help="files, globs (in quotes) or folders of records")
    arguments.add_argument("--to", required=True, choices=list(FORMATS), help="format of the shards")
    arguments.add_argument("--output", required=True, metavar="FOLDER", help="folder to write the shards to")
    arguments.add_argument(
        "--format", choices=list(SOURCES), default="", help="format of the source (default: by file name)"
    )
    arguments.add_argument(
        "--records-per-shard", type=int, default=Conversion.records_per_shard, metavar="N", help="default: %(default)s"
    )
    arguments.add_argument(
        "--name", default=Conversion.name, help="beginning of the file names of the shards (default: %(default)s)"
    )
    arguments.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Convert records; returns the exit code: 1 if that failed."""
    asked = parser().parse_args(argv)

    def lines() -> Iterable[str]:
        conversion = Conversion(asked.source, asked.to, asked.output, asked.format, asked.records_per_shard, asked.name)
        with tqdm(unit="record", unit_scale=True, file=sys.stderr) as bar:

            def tell(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            result = convert(conversion, asked.workers, tell)
        yield f"{result.records} records in {len(result.paths)} shards of {result.size} bytes in all, read again"
        if result.kept:
            yield f"{result.kept} shards were kept from an earlier run"

    return print_lines("convert", lines)
