"""Prepares data modules on all ranks, and deals out their loaders: `datamodule_on_ranks.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import oneflow as flow

from libai_data.engine.datamodule.data_stages import DataStages
from libai_data.engine.datamodule.datamodule import DataModule
from libai_data.errors import ConfigError, PeerError
from libai_data.iterables import default_collate
from libai_data.mesh.current import set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from tests.iterables.rows import rows_of, sample

FOLDER = Path(sys.argv[1])
RANK = flow.env.get_rank()


class Module(DataModule):
    """Notes who prepares, and finds what was prepared."""

    def __init__(self, name: str, per_node: bool, fault: str = "") -> None:
        self.save_hyperparameters()
        self.prepare_data_per_node = per_node

    def prepare_data(self) -> None:
        with open(FOLDER / self.hparams.name, "a") as file:
            file.write(f"{RANK}\n")
        if self.hparams.fault == "exits":
            sys.exit(0)
        if self.hparams.fault:
            raise OSError("no space left")

    def setup(self, stage: str) -> None:
        assert (FOLDER / self.hparams.name).read_text() == "0\n"

    def train_dataloader(self) -> Any:
        return (default_collate([sample(start + row) for row in range(4)]) for start in range(0, 40, 4))


def outcome(module: Module) -> Any:
    stages = DataStages(module)
    try:
        stages.enter("fit")
    except (ConfigError, OSError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    found: list[Any] = []
    for batch, _ in zip(stages.loaders("train")[0], range(3)):
        found.append([rows_of(batch), int(stages.inputs(batch)["y"].shape[0])])
    stages.leave("fit")
    return found


def main() -> None:
    set_mesh(ParallelMesh(4, 1, 1, rank=RANK))
    found: dict[str, Any] = {
        "once a node": outcome(Module("node", True)),
        "once": outcome(Module("job", False)),
        "fails": outcome(Module("failing", True, "raises")),
        "exits": outcome(Module("exiting", True, "exits")),
    }
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
