"""The programs of docs/coming_from.md: two changed lines at most, and the same samples on any number of ranks."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import pytest

import libai_data
from libai_data.mesh.current import set_mesh
from tests.distributed.launcher import launch_ranks
from tests.distributed.scripts import coming_from
from tests.distributed.scripts.coming_from import Rows, Seen, is_installed, programs, run
from tests.properties import slowly

CHANGES = {
    "PyTorch": {
        "from torch.utils.data import DataLoader": "from libai_data import DataLoader, to_global",
        "        train_step(**batch)": "        train_step(**to_global(batch))",
    },
    "LiBai": {
        "from libai.data.build import build_image_train_loader": (
            "from libai_data.integrations.libai import build_image_train_loader"
        ),
    },
    "Lightning": {
        "from pytorch_lightning import Trainer": "from libai_data import DefaultTrainer",
        "Trainer(max_epochs=1).fit(model, datamodule=Points())": "DefaultTrainer(cfg, datamodule=Points()).train()",
    },
    "Grain": {
        "": "from libai_data import from_iterable, to_global",
        "for batch in loader:": "for batch in map(to_global, from_iterable(loader, 4)):",
    },
    "Hugging Face": {
        "from torch.utils.data import DataLoader": "from libai_data import DataLoader, to_global",
        "    train_step(**batch)": "    train_step(**to_global(batch))",
    },
}
SHUFFLED_BY_OTHERS = ("PyTorch", "LiBai", "Hugging Face")


@pytest.fixture(scope="module", params=[slowly(2), slowly(4)])
def on_ranks(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    """Section -> the rows that our program trained on, on 2 x 1 or 2 x 2 ranks, of which each imports all libraries."""
    folder = tmp_path_factory.mktemp("coming_from")
    launch = launch_ranks(Path(coming_from.__file__), request.param, str(folder), timeout=150)
    assert launch.returncode == 0, launch.output
    found: dict[str, Rows] = json.loads((folder / "rows.json").read_text())
    return found


@pytest.mark.parametrize("section", CHANGES)
def test_at_most_two_lines_change(section: str) -> None:
    theirs, ours = (program.splitlines() for program in programs()[section])
    changed = [line for line in difflib.ndiff(theirs, ours) if line[:2] in ("- ", "+ ")]
    before = [line[2:] for line in changed if line[0] == "-"]
    after = [line[2:] for line in changed if line[0] == "+"]
    assert before == [line for line in CHANGES[section] if line]
    assert after == list(CHANGES[section].values())
    assert len(after) <= 2


def lightning_model(seen: Seen) -> Any:
    import pytorch_lightning
    import torch

    class Noting(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            points, labels = batch
            seen.train_step(points=points, labels=labels)
            return torch.nn.functional.cross_entropy(self.layer(points), labels)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Noting()


def row_keys(rows: Rows) -> list[str]:
    return [json.dumps(row, sort_keys=True) for row in rows]


@pytest.mark.parametrize("section", CHANGES)
def test_the_samples_are_theirs_on_one_rank_and_on_several(
    section: str, on_ranks: dict[str, Rows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_installed(section):
        pytest.skip(f"not installed: {section}")
    monkeypatch.chdir(tmp_path)
    theirs, ours = programs()[section]
    if section == "LiBai":
        coming_from.set_up_libai(1, 1)
    seen = Seen()
    given = {"model": lightning_model(seen)} if section == "Lightning" else {}
    expected = seen.rows + run(section, theirs, tmp_path / "theirs", **given)
    set_mesh(None)
    libai_data.init()
    found = run(section, ours, tmp_path / "ours")
    assert row_keys(on_ranks[section]) == row_keys(found)
    if section in SHUFFLED_BY_OTHERS:
        assert sorted(row_keys(found)) == sorted(row_keys(expected))
    else:
        assert row_keys(found) == row_keys(expected)
