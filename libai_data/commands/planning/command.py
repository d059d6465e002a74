"""The command `libai-data plan`: what a job on any number of nodes would read, hold and send, without starting it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from libai_data.commands.console import print_lines
from libai_data.commands.inspection.mesh_of import mesh_of
from libai_data.commands.inspection.step_rows import read_step
from libai_data.commands.one_rank import one_rank_loaders
from libai_data.commands.planning.job import JobPlan, PlannedField
from libai_data.commands.planning.report import report
from libai_data.config import try_get_key
from libai_data.config.lazy_config import load_config
from libai_data.delivery.read_plan import read_mode
from libai_data.engine.models import build_configured_tokenizer
from libai_data.errors import ConfigError
from libai_data.loader.reading import reads_parts


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    arguments = argparse.ArgumentParser(prog="libai-data plan", description=__doc__)
    arguments.add_argument("config", help="config file")
    arguments.add_argument("opts", nargs="*", metavar="key=value", help="changes to it, as in training")
    arguments.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default: %(default)s)")
    arguments.add_argument("--ranks-per-node", type=int, default=1, metavar="N", help="(default: %(default)s)")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments; by default the process's own.

    Returns:
        Exit code: 1 where the config does not fit so many ranks, or its samples cannot be read.
    """
    asked = parser().parse_intermixed_args(argv)
    return print_lines("plan", lambda: _plan(asked))


def _plan(asked: argparse.Namespace) -> list[str]:
    for name in ("nodes", "ranks_per_node"):
        if getattr(asked, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(asked, name)}; it must be at least 1")
    cfg = load_config(asked.config, asked.opts)
    mesh = mesh_of(cfg, asked.nodes * asked.ranks_per_node, asked.nodes)
    opened = one_rank_loaders(cfg, mesh.data_parallel_size, tokenizer=build_configured_tokenizer(cfg))
    try:
        (loader,) = opened.loaders
        rows = read_step(opened, "train", loader, 0, mesh.data_parallel_size, 1, rows=1)
        dataset = getattr(loader, "dataset", None)
    finally:
        opened.close()
    fields = tuple(
        PlannedField(name, values[0].dtype, values[0].shape, rows.layouts[name]) for name, values in rows.values.items()
    )
    first = opened.plan.first
    job = JobPlan(mesh, first.micro_batch_size, fields, reads_parts(dataset))
    readers = read_mode(try_get_key(cfg, "dataloader.train.readers") or "every_rank")
    return report(job, first.num_accumulation_steps, readers)
