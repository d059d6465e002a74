"""The project of docs/training.md, pasted as it stands: it trains on one rank and on four, in graph mode too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from libai_data.launch.launcher import free_port
from tests.deadline import run_to_end
from tests.docs.test_documentation_blocks import blocks_of, environment

# Stands for the package of that name, which sends its numbers away.
WANDB = """
import json, pathlib

class Run:
    def __init__(self, settings):
        self.lines, self.path = [], pathlib.Path(settings["dir"], "wandb.json")

    def log(self, values, step):
        self.lines.append([step, values])

    def finish(self):
        self.path.write_text(json.dumps(self.lines))

def init(**settings):
    return Run(settings)
"""


@pytest.fixture()
def project(repository: Path, tmp_path: Path) -> Path:
    for block in blocks_of(repository / "docs" / "training.md"):
        if "<<'END'" in block.code:
            files = block.code[: block.code.rindex("END\n") + len("END\n")]
            subprocess.run(["bash", "-e", "-c", files], cwd=tmp_path, check=True)
    (tmp_path / "wandb.py").write_text(WANDB)
    return tmp_path


def launch(project: Path, ranks: int, *words: str) -> str:
    command = [sys.executable, "-m", "libai_data", "launch", "--nproc_per_node", str(ranks)]
    command += ["--master_port", str(free_port()), *words]
    ended = run_to_end(command, 300, cwd=project, env=environment())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def metrics(folder: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for line in map(json.loads, (folder / "metrics.json").read_text().splitlines()):
        for name, value in line.items():
            found.setdefault(name, {})[line["iteration"]] = value
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_project_trains_with_its_own_parts(project: Path, ranks: int) -> None:
    log = launch(project, ranks, *["train.py", "project.py", "train.train_iter=40", "train.log_period=10"])
    assert f"A step uses 32 sample(s): {16 // ranks} on each data-parallel rank, 2 time(s)." in log
    output = project / "output" / "project"
    measured = metrics(output)
    assert measured["total_loss"][39] < measured["total_loss"][9]
    assert sorted(measured["weight_norm"]) == [9, 19, 29, 39]
    assert sorted(measured["Acc@1"]) == sorted(measured["accuracy_0"]) == sorted(measured["accuracy_1"]) == [19, 39]
    assert all(accuracy > 70 for accuracy in measured["accuracy_0"].values())
    logged = [(step, name) for step, values in json.loads((output / "wandb.json").read_text()) for name in values]
    assert {(39, "total_loss"), (39, "weight_norm"), (19, "accuracy_1")} <= set(logged)
    assert list(output.glob("events.out.tfevents.*"))


@pytest.mark.slow
def test_the_project_trains_in_graph_mode_and_ends_early_on_all_ranks(project: Path) -> None:
    # A step must take milliseconds, also beside other tests: see the page on the architecture about graphs on CPUs.
    words = ["train.train_iter=60", "graph.enabled=True", "model.hidden=131072", "train.num_accumulation_steps=1"]
    words += ["train.evaluation.eval_period=5", "train.early_stopping.patience=1", "train.early_stopping.min_delta=100"]
    log = launch(project, 2, "train", "project.py", *words)
    assert "The training ends early: Acc@1 has not improved for 1 evaluations" in log
    assert max(metrics(project / "output" / "project")["total_loss"]) == 9
    log = launch(project, 1, "train", *words, "--resume", "project.py")
    assert "The run has ended early" in log
