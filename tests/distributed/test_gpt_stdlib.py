"""`make train-gpt`, shortened: a few source files, a few steps; learns, resumes exactly, is the same on one rank."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from libai_data.commands import main
from tests.distributed.examples import train_example, values
from tools.prepare_stdlib import write_stdlib_corpus

pytestmark = pytest.mark.slow
STEPS = 12
FILES = 70


def train(folder: Path, output: str, ranks: int, *overrides: str) -> None:
    """What `make train-gpt` starts, on a smaller model."""
    options = ("train.global_batch_size=8", "train.checkpointer.period=4", "train.evaluation.eval_iter=4")
    train_example("gpt_stdlib.py", folder, output, ranks, *overrides, f"train.train_iter={STEPS}", *options)


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
    perplexities = values(job / "whole", "perplexity")
    assert perplexities and perplexities[-1] < 1024  # half of what one has that knows nothing of its 2,048 tokens
    losses = values(job / "whole")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5


def test_one_rank_has_the_same_losses(job: Path) -> None:
    train(job, "one", 1)
    np.testing.assert_allclose(values(job / "one"), values(job / "whole"), rtol=1e-4)


def test_the_job_resumes_exactly(job: Path) -> None:
    (job / "cut").mkdir()
    shutil.copytree(job / "whole" / "model_0000003", job / "cut" / "model_0000003")
    (job / "cut" / "last_checkpoint").write_text("model_0000003")
    train(job, "cut", 4, "--resume")
    assert values(job / "cut") == values(job / "whole")[4:]
    assert values(job / "cut", "perplexity")[-1] == values(job / "whole", "perplexity")[-1]
