"""The command `libai-data inspect`: a page of what a config feeds to its model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from libai_data.atomic_files import output_file, written_whole
from libai_data.commands.console import config_parser, print_lines
from libai_data.commands.inspection.inspection import inspect_config
from libai_data.commands.inspection.page import page_of
from libai_data.commands.one_rank import mesh_of
from libai_data.config.lazy_config import load_config


def parser() -> argparse.ArgumentParser:
    arguments = config_parser("inspect", __doc__, asks_ranks=True)
    arguments.add_argument("--split", default="train", help="train, valid or test, the first test loader")
    arguments.add_argument("--step", type=int, default=0, metavar="N", help="step to show (default: the first, 0)")
    arguments.add_argument(
        "--samples", type=int, default=16, metavar="N", help="samples to show (default: %(default)s)"
    )
    arguments.add_argument(
        "--output", type=output_file, default="inspect.html", help="page to write (default: %(default)s)"
    )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 1 if something cannot be read or written. Warnings do not change it."""
    asked = parser().parse_intermixed_args(argv)
    return print_lines("inspect", lambda: _inspect(asked))


def _inspect(asked: argparse.Namespace) -> list[str]:
    cfg = load_config(asked.config, asked.opts)
    found = inspect_config(
        cfg,
        " ".join([asked.config, *asked.opts]),
        asked.split,
        asked.step,
        asked.samples,
        mesh_of(cfg, asked.ranks, asked.nodes),
    )
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(asked.output) as unfinished:
        unfinished.write_text(page_of(found), encoding="utf-8")
    return [*(f"warning: {each}" for each in found.findings), f"The page is {asked.output}."]
