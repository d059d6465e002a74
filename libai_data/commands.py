"""The console commands, for functions whose results are not exit codes."""

from __future__ import annotations


def train() -> None:
    """`libai-data-train`: train or evaluate, without the results becoming the exit code."""
    from libai_data.engine.command import main

    main()
