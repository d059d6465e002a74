"""Functions that all console commands use: tables, lines printed at once, errors as one line and an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Callable

from libai_data.config.arguments import IntermixedParser
from libai_data.errors import DataPipelineError


def config_parser(command: str, description: str | None, asks_ranks: bool = False) -> argparse.ArgumentParser:
    """Make the parser of a command that reads a config; with `asks_ranks` it has --ranks and --nodes too."""
    arguments = IntermixedParser(prog=f"libai-data {command}", description=description)
    arguments.add_argument("config", help="config file")
    arguments.add_argument(
        "opts", nargs="*", default=[], metavar="key=value", help="changes to the config, as in training"
    )
    if asks_ranks:
        arguments.add_argument("--ranks", type=int, metavar="N", help="ranks of the training (default: of train.dist)")
        arguments.add_argument(
            "--nodes", type=int, default=1, metavar="N", help="machines of the training (default: 1)"
        )
    return arguments


def print_lines(
    command: str,
    lines: Callable[[], Iterable[str]],
    also_told: tuple[type[Exception], ...] = (),
    of_arguments: type[Exception] | tuple[()] = (),
) -> int:
    """Print the lines of a command; returns the exit code: 1 after an error, which is printed as a line on stderr.

    This applies to `DataPipelineError`, OSError and the classes of `also_told`; other errors are raised. After an error
    of the class `of_arguments`, the exit code is 2.
    """
    told: tuple[type[Exception], ...] = (DataPipelineError, OSError) + also_told
    try:
        for line in lines():
            print(line, flush=True)
    except BrokenPipeError:
        raise  # `commands.main` decides whether the broken pipe is the output.
    except told as error:
        print(f"libai-data {command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, of_arguments) else 1
    return 0


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line for each row, with aligned columns; all rows must have the same number of cells."""
    widths = widths_of(rows)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def widths_of(rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column, in characters."""
    return [max(map(len, column)) for column in zip(*rows)]


def with_ruled_head(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines as of `aligned`, with dashes below each column of the first row."""
    head, *lines = aligned(rows)
    return [head, "  ".join("-" * width for width in widths_of(rows)), *lines]
