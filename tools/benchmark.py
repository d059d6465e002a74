"""Measure the pipeline beside its peers and limits: `python tools/benchmark.py loader`."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import pkgutil
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from libai_data.atomic_files import output_file
from libai_data.errors import ConfigError, nearest
from tools.benchmarks import suites
from tools.benchmarks.peer_process import versions as peer_versions
from tools.benchmarks.results import report, table
from tools.benchmarks.rows import Measured, Row, Scale, measure

_SECONDS, _QUICK_SECONDS = 1.0, 0.1


def suite_names() -> list[str]:
    """Names of the suites there are."""
    return sorted(module.name for module in pkgutil.iter_modules(suites.__path__))


def chosen(rows: Sequence[Row], only: Sequence[str] | None) -> list[Row]:
    """The rows whose names were given; all of them if none was.

    Raises:
        ConfigError: There is no row of this name.
    """
    names = [row.name for row in rows]
    for name in only or ():
        if name not in names:
            raise ConfigError(f"--only {name}: there is no such row; there are {names}.{nearest(name, names)}")
    return [row for row in rows if not only or row.name in only]


def run(rows: Sequence[Row], rounds: int) -> list[Measured]:
    """Measure rows one after the other, with a bar that shows how far it is."""
    results = []
    with tqdm(total=sum(rounds * len(row.contenders) for row in rows), unit="run", file=sys.stderr) as bar:
        for row in rows:
            bar.set_description(row.name)

            def step(contender: str) -> None:
                bar.set_postfix_str(contender, refresh=False)
                bar.update()

            result = measure(row, rounds, step)
            bar.update(rounds * len(result.missing))
            results.append(result)
    return results


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("suite", choices=suite_names(), help="what to measure")
    arguments.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    arguments.add_argument("--quick", action="store_true", help="much less work, to see that everything runs")
    arguments.add_argument("--only", action="append", metavar="ROW", help="only this row; may be repeated")
    arguments.add_argument("--json", type=output_file, metavar="FILE", help="write all raw numbers there")
    arguments.add_argument(
        "--peers-python",
        metavar="PATH",
        default=sys.executable,
        help="Python that has the peers' packages (default: this)",
    )
    arguments.add_argument("--cores", type=int, default=2, help="processor cores to use (default 2; 0 for all)")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a suite, print its table, and write its numbers; returns the exit code."""
    asked = parser().parse_args(argv)
    if asked.cores < 0:
        parser().error(f"--cores is {asked.cores}; it must be at least 0 (0 for all)")
    if asked.rounds < 1:
        parser().error(f"--rounds is {asked.rounds}; at least 1 is needed")
    if not shutil.which(asked.peers_python):
        parser().error(f"--peers-python {asked.peers_python}: there is no such program")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    cores_before = os.sched_getaffinity(0)
    if asked.cores:
        # Before OneFlow is imported, whose threads would otherwise keep all cores.
        os.sched_setaffinity(0, sorted(cores_before)[: asked.cores])
    try:
        with tempfile.TemporaryDirectory(prefix="libai_data_benchmark_") as folder:
            scale = Scale(asked.quick, _QUICK_SECONDS if asked.quick else _SECONDS, Path(folder), asked.peers_python)
            suite = importlib.import_module(f"{suites.__name__}.{asked.suite}")
            try:
                rows = chosen(suite.rows(scale), asked.only)
            except ConfigError as error:
                parser().error(str(error))
            results = run(rows, asked.rounds)
        print(table(results))
        if asked.json:
            content = report(asked.suite, asked.rounds, asked.quick, results, peer_versions(asked.peers_python))
            asked.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    finally:
        os.sched_setaffinity(0, cores_before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
