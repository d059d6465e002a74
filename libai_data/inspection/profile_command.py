"""The command `libai-data profile`: how fast a config's loader is with 0 to all cores as workers, and what to set."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from libai_data.config import try_get_key
from libai_data.console import print_lines
from libai_data.engine.models import build_configured_tokenizer
from libai_data.engine.one_rank import load_config, one_rank_loaders
from libai_data.errors import ConfigError
from libai_data.inspection.mesh_of import mesh_of
from libai_data.inspection.profiling import STAGES, Measurement, cores, measure, recommend, worker_counts
from libai_data.structures import Instance, fields_of


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    arguments = argparse.ArgumentParser(prog="libai-data profile", description=__doc__)
    arguments.add_argument("config", help="config file")
    arguments.add_argument("opts", nargs="*", metavar="key=value", help="changes to it, as in training")
    arguments.add_argument("--seconds", type=float, default=3.0, help="to measure each setting (default: %(default)s)")
    arguments.add_argument(
        "--workers", type=int, nargs="+", metavar="N", help="settings to measure (default: 0..cores)"
    )
    arguments.add_argument("--ranks", type=int, metavar="N", help="of the training (default: what train.dist says)")
    arguments.add_argument("--nodes", type=int, default=1, metavar="N", help="that they are on (default: %(default)s)")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments; by default the process's own.

    Returns:
        Exit code: 1 where the config cannot be read, or its loader not be measured.
    """
    asked = parser().parse_intermixed_args(argv)
    return print_lines("profile", lambda: _profile(asked))


def _profile(asked: argparse.Namespace) -> Iterator[str]:
    if not 0 < asked.seconds < inf:
        raise ConfigError(f"--seconds is {asked.seconds}; it must be above 0, and finite")
    counts = asked.workers or worker_counts(cores())
    if min(counts) < 0:
        raise ConfigError(f"--workers has {min(counts)}; the least is 0")
    cfg = load_config(asked.config, asked.opts)
    mesh = mesh_of(cfg, asked.ranks, asked.nodes)
    tokenizer = build_configured_tokenizer(cfg)
    measurements: list[Measurement] = []
    stages = "  ".join(f"{stage + ' us':>12}" for stage in STAGES)
    yield f"{'workers':>7}  {'samples/s':>10}  {stages}  bottleneck"
    for workers in counts:
        rank = one_rank_loaders(cfg, mesh.data_parallel_size, num_workers=workers, tokenizer=tokenizer)
        try:
            measurements.append(measure(_with_stats(rank.loaders[0]), workers, asked.seconds, _rows_of))
        finally:
            rank.close()
        yield _line(measurements[-1])
    readers = try_get_key(cfg, "dataloader.train.readers") or "data_parallel"
    recommended = recommend(measurements, mesh, readers)
    yield ""
    yield from recommended.reasons
    yield f"Recommended: {' '.join(recommended.overrides())}"


def _line(measured: Measurement) -> str:
    costs = "  ".join(f"{cost * 1e6:12,.1f}" for cost in measured.seconds)
    return f"{measured.workers:7}  {measured.rate:10,.0f}  {costs}  {measured.bottleneck}"


def _with_stats(loader: Any) -> Any:
    if not callable(getattr(loader, "stats", None)):
        raise ConfigError(f"the train loader is a {type(loader).__name__}, which has no stats(), so it is not measured")
    return loader


def _rows_of(batch: Any) -> int:
    """The samples that the loader read for a batch; of a batch of another origin, dim 0 of its first field."""
    if isinstance(batch, Instance) and batch._rows is not None:
        return len(batch._rows.indices)
    value = next(iter(fields_of(batch).values()))
    return int(getattr(value, "tensor", value).shape[0])
