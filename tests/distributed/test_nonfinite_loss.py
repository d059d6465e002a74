from __future__ import annotations

from pathlib import Path

from tests.distributed.launcher import launch_ranks

SCRIPT = Path(__file__).parent / "scripts" / "nonfinite_loss.py"


def test_a_nan_loss_stops_all_ranks_after_the_same_step_with_the_same_error(tmp_path: Path) -> None:
    result = launch_ranks(SCRIPT, 2, str(tmp_path), timeout=120)
    assert result.returncode == 0, result.output
    first, second = ((tmp_path / f"rank{rank}.txt").read_text() for rank in range(2))
    assert first == second
    assert "has a loss that is NaN or infinite: loss = nan. The step's samples" in first
    for kind in ("local", "broadcast"):
        assert f"\n{kind}: step 5 has a loss that is NaN or infinite: that of rank 1 alone. To train on" in first
