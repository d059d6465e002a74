"""Tokens are counted once on each mesh, whoever holds them."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launcher import launch_ranks


def test_each_real_token_is_counted_once_on_every_mesh() -> None:
    launch = launch_ranks(Path(__file__).parent / "scripts" / "count_tokens.py", 4)
    assert launch.returncode == 0 and "counted" in launch.output, launch.output
