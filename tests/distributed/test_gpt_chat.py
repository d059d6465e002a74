"""`configs/gpt_chat.py`, shortened: learns answers from packed conversations, the same on 1 and 4 ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data.datasets.chats import conversation, tokenizer_folder
from tests.deadline import run_to_end
from tests.distributed.processes import JOB_VARIABLES, REPOSITORY

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytestmark = pytest.mark.slow
STEPS = 16
ANSWERS = {"fox": "the quick brown fox jumps", "dog": "a lazy dog", "queens": "seven wizards make toxic brew"}


def train(folder: Path, output: str, ranks: int) -> list[float]:
    """Losses of a training on so many ranks."""
    command = [sys.executable, "-m", "libai_data.launch", "--nproc_per_node", str(ranks)]
    command += [str(REPOSITORY / "tools" / "train_net.py"), "--config-file", str(REPOSITORY / "configs/gpt_chat.py")]
    command += [f"train.output_dir={output}", f"train.train_iter={STEPS}", "train.log_period=1", "model.dim=32"]
    command += ["optim.lr=0.01", "train.evaluation.eval_period=8", "train.evaluation.eval_iter=2"]
    command += [f"train.dist.tensor_parallel_size={2 if ranks == 4 else 1}"]
    env = {name: value for name, value in os.environ.items() if name not in JOB_VARIABLES}
    env["PYTHONPATH"] = str(REPOSITORY)
    done = run_to_end(command, 300, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / output / "metrics.json").read_text().splitlines()]
    return [line["total_loss"] for line in lines if "total_loss" in line]


def test_the_loss_of_answers_falls_and_is_the_same_on_one_rank_and_four(tmp_path: Path) -> None:
    data = tmp_path / "data" / "chat"
    tokenizer_folder(data / "tokenizer")
    random = np.random.default_rng(0)
    for part, count in (("train", 200), ("test", 40)):
        asked = random.choice(sorted(ANSWERS), count)
        rows = [conversation(f"Tell me of the {word} {random.integers(100)}.", ANSWERS[word]) for word in asked]
        (data / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    four = train(tmp_path, "four", 4)
    assert len(four) == STEPS
    # Few tokens are answers, and these repeat themselves: what is asked would not fall so fast.
    assert four[-1] < 0.5 * four[0]
    np.testing.assert_allclose(train(tmp_path, "one", 1), four, rtol=1e-4)
