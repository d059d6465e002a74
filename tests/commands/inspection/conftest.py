from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    """Configs are named, and import each other, from the repository."""
    monkeypatch.chdir(repository)
