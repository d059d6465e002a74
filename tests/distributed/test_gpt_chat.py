"""`configs/gpt_chat.py`, shortened: learns answers from packed conversations, the same on 1 and 4 ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.datasets.chats import conversation, tokenizer_folder
from tests.distributed.examples import train_example, values

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytestmark = pytest.mark.slow
STEPS = 16
ANSWERS = {"fox": "the quick brown fox jumps", "dog": "a lazy dog", "queens": "seven wizards make toxic brew"}


def train(folder: Path, output: str, ranks: int) -> list[float]:
    """Losses of a training on so many ranks."""
    options = (f"train.train_iter={STEPS}", "train.evaluation.eval_period=8", "train.evaluation.eval_iter=2")
    train_example("gpt_chat.py", folder, output, ranks, *options)
    return values(folder / output)


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
