"""Runs trainings of the example configs, and reads their metrics."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.deadline import run_to_end
from tests.distributed.processes import JOB_VARIABLES, REPOSITORY
from tests.engine.data_runs import metric


def train_example(config: str, folder: Path, output: str, ranks: int, *overrides: str) -> None:
    """Train a config of the repository on so many ranks, in a folder; four ranks are 2 x 2."""
    command = [sys.executable, "-m", "libai_data.launch", "--nproc_per_node", str(ranks)]
    command += [str(REPOSITORY / "tools" / "train_net.py"), "--config-file", str(REPOSITORY / "configs" / config)]
    command += [*overrides, f"train.output_dir={output}", "train.log_period=1", "model.dim=32", "optim.lr=0.01"]
    command += [f"train.dist.tensor_parallel_size={2 if ranks == 4 else 1}"]
    env = {name: value for name, value in os.environ.items() if name not in JOB_VARIABLES}
    env["PYTHONPATH"] = str(REPOSITORY)
    run_to_end(command, 300, check=True, cwd=folder, env=env)


def values(folder: Path, name: str = "total_loss") -> list[float]:
    """A metric, in the order of the steps that logged it."""
    return [value for _, value in sorted(metric(folder, name).items())]
