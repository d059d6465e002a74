"""`make train-gpt`, shortened: a few source files, a few steps; learns, resumes exactly, is the same on one rank."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from libai_data.commands import main
from tests.deadline import run_to_end
from tests.distributed.processes import JOB_VARIABLES, REPOSITORY
from tools.prepare_stdlib import write_stdlib_corpus

pytestmark = pytest.mark.slow
STEPS = 12
FILES = 70


def train(folder: Path, output: str, ranks: int, *overrides: str) -> None:
    """What `make train-gpt` starts, on a smaller model."""
    command = [sys.executable, "-m", "libai_data.launch", "--nproc_per_node", str(ranks)]
    command += [str(REPOSITORY / "tools" / "train_net.py"), "--config-file", str(REPOSITORY / "configs/gpt_stdlib.py")]
    command += [*overrides, f"train.output_dir={output}", f"train.train_iter={STEPS}", "train.log_period=1"]
    command += ["model.dim=32", "train.global_batch_size=8", "train.checkpointer.period=4", "optim.lr=0.01"]
    command += ["train.evaluation.eval_iter=4", f"train.dist.tensor_parallel_size={2 if ranks == 4 else 1}"]
    env = {name: value for name, value in os.environ.items() if name not in JOB_VARIABLES}
    env["PYTHONPATH"] = str(REPOSITORY)
    done = run_to_end(command, 300, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def metric(folder: Path, name: str = "total_loss") -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    found = {line["iteration"]: line[name] for line in lines if name in line}
    return [found[step] for step in sorted(found)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the corpus lies, and in which the job has run on 4 ranks."""
    folder = tmp_path_factory.mktemp("job")
    stdlib, data = folder / "stdlib", folder / "data" / "stdlib"
    stdlib.mkdir()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:FILES]:
        shutil.copy(path, stdlib)
    write_stdlib_corpus(data, stdlib)
    tokenizer = str(data / "tokenizer.json")
    assert not main(
        ["train-tokenizer", "--input", str(data / "train.jsonl"), "--output", tokenizer, "--vocab-size", "400"]
    )
    for part in ("train", "test"):
        prefix, source = str(data / part), str(data / f"{part}.jsonl")
        arguments = ["--input", source, "--tokenizer", tokenizer, "--append-eod", "--output-prefix", prefix]
        assert not main(["preprocess", *arguments])
    train(folder, "whole", 4)
    return folder


def test_perplexity_on_files_that_were_held_out_falls(job: Path) -> None:
    perplexities = metric(job / "whole", "perplexity")
    assert perplexities and perplexities[-1] < 1024  # half of what one has that knows nothing of its 2,048 tokens
    losses = metric(job / "whole")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5


def test_one_rank_has_the_same_losses(job: Path) -> None:
    train(job, "one", 1)
    np.testing.assert_allclose(metric(job / "one"), metric(job / "whole"), rtol=1e-4)


def test_the_job_resumes_exactly(job: Path) -> None:
    (job / "cut").mkdir()
    shutil.copytree(job / "whole" / "model_0000003", job / "cut" / "model_0000003")
    (job / "cut" / "last_checkpoint").write_text("model_0000003")
    train(job, "cut", 4, "--resume")
    assert metric(job / "cut") == metric(job / "whole")[4:]
    assert metric(job / "cut", "perplexity")[-1] == metric(job / "whole", "perplexity")[-1]
