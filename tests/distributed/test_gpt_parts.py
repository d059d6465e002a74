"""Ranks that each read their part of GPT samples hold together what one rank reads, with every layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.data.datasets.gpt_corpora import write
from tests.distributed.launcher import launch_ranks

SCRIPT = Path(__file__).parent / "scripts" / "gpt_parts.py"


def test_parts_of_samples_are_the_whole_batch_on_every_mesh_and_cu_seqlens_stays_whole(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(0, 5000, size).tolist() for size in random.integers(0, 60, 100)]
    corpus = write(tmp_path / "corpus", documents)
    launch = launch_ranks(SCRIPT, 4, str(corpus), str(tmp_path / "found.json"), timeout=150)
    assert launch.returncode == 0, launch.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 3 * 2 * 5
    for case, parts in found.items():
        if "node" in case:
            # One rank reads for all of its node; each takes its part of what it maps.
            assert parts == [], case
        else:
            assert "input_ids" in parts and "cu_seqlens" not in parts, case
            assert ("attention_mask" in parts) == ("mask" in case), case
