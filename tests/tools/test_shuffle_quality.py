"""The table that compares orders by the distances of stored neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from tools.shuffle_quality import quality_of


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
