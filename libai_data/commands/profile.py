"""The command `libai-data profile`: measure a config's loader with 0 to all cores as workers, and recommend workers."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, Callable, NamedTuple

from libai_data.commands.console import config_parser, print_lines
from libai_data.commands.inspection.inspection import STAGES
from libai_data.commands.one_rank import mesh_of, one_rank_loaders
from libai_data.commands.plan import JobPlan
from libai_data.config import try_get_key
from libai_data.config.lazy_config import load_config
from libai_data.data.attributes import attribute_of
from libai_data.data.sources.fetch_log import in_words
from libai_data.delivery.read_plan import ReadPlan, read_mode
from libai_data.engine.models import build_configured_tokenizer
from libai_data.errors import ConfigError
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.structures import fields_of, origin_of

_GOOD_ENOUGH = 0.95  # each worker costs memory, so the fewest that reach this share of the best rate are recommended
_WARM_UP_BATCHES = 2


class Measurement(NamedTuple):
    """The numbers of one run of a loader, without its first batches."""

    workers: int  # worker processes
    rate: float  # samples a second
    seconds: Sequence[float]  # seconds per sample, for each of `STAGES`
    batch: float  # seconds from one batch to the next
    fixed: float  # seconds that the trainer spends on a batch, besides reading samples
    streaming: str = ""  # what a streamed source fetched, in words; "" if the source is not streamed

    @property
    def bottleneck(self) -> str:
        """The stage that needs the most time. No model computes between batches, so the loader never waits for one."""
        return STAGES[max(range(len(STAGES)), key=self.seconds.__getitem__)]

    def line(self) -> str:
        """The line of this run in the table."""
        costs = "  ".join(f"{cost * 1e6:12,.1f}" for cost in self.seconds)
        batch = f"{self.batch * 1e6:12,.1f}  {self.fixed * 1e6:12,.1f}"
        return f"{self.workers:7}  {self.rate:10,.0f}  {costs}  {batch}  {self.bottleneck}"


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    arguments = config_parser("profile", __doc__, asks_ranks=True)
    arguments.add_argument(
        "--seconds", type=float, default=3.0, help="duration of each measurement (default: %(default)s)"
    )
    arguments.add_argument(
        "--workers", type=int, nargs="+", metavar="N", help="numbers of workers to measure (default: 0..cores)"
    )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 1 if the config cannot be read, or its loader cannot be measured."""
    asked = parser().parse_intermixed_args(argv)
    return print_lines("profile", lambda: _profile(asked))


def _profile(asked: argparse.Namespace) -> Iterator[str]:
    if not 0 < asked.seconds < inf:
        raise ConfigError(f"--seconds is {asked.seconds}; it must be above 0, and finite")
    counts = asked.workers or worker_counts(len(os.sched_getaffinity(0)))
    if min(counts) < 0:
        raise ConfigError(f"--workers has {min(counts)}; each number must be at least 0")
    cfg = load_config(asked.config, asked.opts)
    mesh = mesh_of(cfg, asked.ranks, asked.nodes)
    tokenizer = build_configured_tokenizer(cfg)
    measurements: list[Measurement] = []
    sets_own = False
    stages = "  ".join(f"{stage + ' us':>12}" for stage in STAGES)
    yield f"{'workers':>7}  {'samples/s':>10}  {stages}  {'batch us':>12}  {'fixed us':>12}  bottleneck"
    for workers in counts:
        rank = one_rank_loaders(cfg, mesh.data_parallel_size, num_workers=workers, tokenizer=tokenizer)
        try:
            own = attribute_of(rank.loaders[0], "num_workers", workers)
            sets_own = own != workers
            if sets_own and measurements:
                break
            measurements.append(measure(rank.loaders[0], own, asked.seconds))
        finally:
            rank.close()
        yield measurements[-1].line()
        if measurements[-1].streaming:
            yield f"         streaming: {measurements[-1].streaming}"
        if sets_own:
            break
    readers = read_mode(try_get_key(cfg, "dataloader.train.readers") or "every_rank")
    overrides, reasons = recommend(measurements, mesh, readers)
    if sets_own:
        reasons.append(
            "No other number of workers was measured: this loader's is set where it is made, such as in the DataModule."
        )
        overrides = overrides[1:]
    yield from ("", *reasons)
    if overrides:
        yield f"Recommended: {' '.join(overrides)}"


def worker_counts(most: int) -> list[int]:
    """Numbers of workers to measure: 0 to `most`; above 8 only powers of two, and `most` itself."""
    doubling = [2**power for power in range(4, most.bit_length())]
    return sorted({*range(min(most, 8) + 1), *(count for count in doubling if count < most), most})


def measure(
    loader: Any,
    workers: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    busy: Callable[[], float] = time.thread_time,
) -> Measurement:
    """Read batches as fast as possible for `seconds`, and at least one batch. A finite loader is repeated.

    Args:
        workers: workers of the loader. If it has none, the trainer reads the samples; this is not a fixed cost.
        busy: returns the processor time of the trainer's thread, in seconds.
    """
    if not callable(attribute_of(loader, "stats")):
        raise ConfigError(f"the train loader is a {type(loader).__name__}, which has no stats(), so it is not measured")
    batches = _batches(loader)
    for _ in range(_WARM_UP_BATCHES):
        next(batches)
    before = loader.stats()
    rows, count, start, used = 0, 0, clock(), busy()
    while rows == 0 or clock() - start < seconds:
        rows += _rows_of(next(batches))
        count += 1
    taken, used, after = clock() - start, busy() - used, loader.stats()
    samples = after["samples"] - before["samples"]
    spent = [after[f"{stage}_seconds"] - before[f"{stage}_seconds"] for stage in STAGES]
    fixed = used if workers else max(0.0, taken - sum(spent))
    costs = [each / samples if samples else 0.0 for each in spent]
    return Measurement(workers, rows / taken, costs, taken / count, fixed / count, in_words(after))


def _batches(loader: Any) -> Iterator[Any]:
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise ConfigError(f"the train loader ({type(loader).__name__}) yields no batch; its dataset may be empty")


def _rows_of(batch: Any) -> int:
    """The number of samples that the loader read for a batch; if unknown, the size of the first field's dim 0."""
    rows = origin_of(batch).rows
    if rows is not None:
        return len(rows.indices)
    value = next(iter(fields_of(batch).values()))
    return int(getattr(value, "tensor", value).shape[0])


def recommend(
    measurements: Sequence[Measurement], mesh: ParallelMesh, readers: str = "every_rank"
) -> tuple[list[str], list[str]]:
    """Choose the number of workers and the read mode from measurements of one loader.

    The ranks of a node share the cores that were measured. `readers` is the read mode of the config. Returns the
    settings, as `key=value` of a config, and the reasons, in words.
    """
    best = max(measurements, key=lambda each: each.rate)
    enough = min(
        (each for each in measurements if each.rate >= _GOOD_ENOUGH * best.rate), key=lambda each: each.workers
    )
    reasons = [
        f"{enough.workers} worker(s) reach {enough.rate:,.0f} samples/s, {enough.rate / best.rate:.0%} of the best "
        f"({best.workers}: {best.rate:,.0f})."
    ]
    overrides = []
    wanted, why = JobPlan(mesh, 1, ()).recommended()
    if readers == "every_rank" and wanted != readers:
        readers = wanted
        reasons.append(f"{why[0].upper()}{why[1:]}; with readers={readers}, only once.")
        overrides.append(f"dataloader.train.readers={readers}")
    plan = ReadPlan(mesh, readers)
    shards = [len(plan.shards_read_by(rank)) for rank in plan.ranks_of(0)]
    reading = sum(map(bool, shards))
    workers = -(-enough.workers // reading)
    if reading > 1:
        reasons.append(f"{reading} ranks of a node read, and share its cores: {workers} worker(s) each.")
    # All ranks that read share the workers' cores, but without workers each of them reads in its own thread.
    reasons.append(_step_times_without_wait(enough, sum(shards) if workers else max(shards)))
    cost = max(best.seconds)
    reasons.append(f"Most of a worker's time goes into '{best.bottleneck}': {cost * 1e6:,.0f} microseconds a sample.")
    return [f"dataloader.train.num_workers={workers}", *overrides], reasons


def _step_times_without_wait(found: Measurement, shards: int) -> str:
    """From which step time on the loader costs nothing, if it reads the batches of `shards` data-parallel ranks."""
    span = found.batch * shards
    if not found.workers:
        return (
            f"Without workers, a step waits {_span(span)} for each batch ({_span(found.fixed)} of this are "
            f"fixed): at most 1% of steps of {_span(100 * span)} or longer."
        )
    return (
        f"Steps of {_span(span)} or longer for each batch do not wait for data. The trainer's fixed "
        f"cost of a batch remains, {_span(found.fixed)}: at most 1% of steps of {_span(100 * found.fixed)} or longer."
    )


def _span(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
