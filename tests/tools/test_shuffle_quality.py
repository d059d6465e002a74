"""The table that compares orders by the distances of stored neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from tools.shuffle_quality import main, quality_of


def test_quality_is_that_of_known_streams() -> None:
    lengths = np.full(100, 200)
    stored = quality_of(np.arange(20_000), lengths, 100)
    assert stored.distances[-1] == 1 / 20_000
    assert (stored.shards, stored.live) == (1, 1)
    full = quality_of(np.random.default_rng(0).permutation(20_000), lengths, 100)
    # Of two random places, the distance is below x with the probability 1 - (1 - x)^2.
    assert np.allclose(full.distances, 1 - np.sqrt(1 - np.array([0.01, 0.1, 0.5, 0.9])), rtol=0.1)
    assert full.together == pytest.approx(1, abs=0.3)
    assert full.live == 100


def test_larger_blocks_and_more_lanes_shuffle_better_and_keep_more_shards_open(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--shards", "100", "--samples", "60", "--lanes", "4", "8", "--blocks", "1", "4"]) == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    cells = {row.split(" | ")[0].strip("| "): row.split(" | ")[1:] for row in rows}
    median = {name: float(row[2]) for name, row in cells.items()}
    live = {name: int(row[-1].strip("| ")) for name, row in cells.items()}
    names = [f"lanes={lanes}, block={block}" for lanes, block in ((4, 1), (8, 1), (8, 4))]
    assert [median[name] for name in [*names, "full shuffle"]] == sorted(
        median[name] for name in [*names, "full shuffle"]
    )
    assert live[names[0]] < live[names[1]] < live[names[2]] < live["full shuffle"]
