"""Runs the programs of docs/coming_from.md: `coming_from.py FOLDER`, ours of each section, on every rank.

Rank 0 writes the rows that each program trained on to FOLDER/rows.json. test_coming_from.py runs the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import oneflow as flow

import libai_data
from libai_data.mesh.current import set_mesh
from tests.docs.test_documentation_blocks import REPOSITORY, blocks_of
from tests.engine.tiny import TinyModel, tiny_config

PAGE = REPOSITORY / "docs" / "coming_from.md"
STEPS = 2
"""Global batches of 16 samples in the 32 of each program, where the program does not end by itself."""
NEEDED = {
    "PyTorch": "torch",
    "LiBai": "libai",
    "Lightning": "pytorch_lightning",
    "Grain": "grain",
    "Hugging Face": "datasets",
}
Rows = list[dict[str, Any]]


def is_installed(section: str) -> bool:
    return find_spec(NEEDED[section]) is not None


def programs() -> dict[str, tuple[str, str]]:
    """Section -> their program and ours."""
    blocks = [block for block in blocks_of(PAGE) if block.language == "python"]
    found: dict[str, list[str]] = {}
    for block in blocks:
        lines = PAGE.read_text().splitlines()[: block.line]
        section = next(line for line in reversed(lines) if line.startswith("## "))
        found.setdefault(section.removeprefix("## From "), []).append(block.code)
    return {section: (theirs, ours) for section, (theirs, ours) in found.items()}


class Seen:
    """The rows of all batches that a program trained on."""

    def __init__(self) -> None:
        self.rows: Rows = []

    def train_step(self, **fields: Any) -> None:
        values = {name: field.numpy() if hasattr(field, "numpy") else field for name, field in fields.items()}
        (size,) = {len(value) for value in values.values()}
        self.rows += [{name: value[row].tolist() for name, value in values.items()} for row in range(size)]


def model_that_notes(seen: Seen) -> type[TinyModel]:
    class Noting(TinyModel):
        def forward(self, points: Any, labels: Any | None = None) -> dict[str, Any]:
            if self.training:
                seen.train_step(points=points, labels=labels)
            return super().forward(points, labels)

    return Noting


def our_config(folder: Path, seen: Seen, tensor: int) -> Any:
    """The config of the section on Lightning: two steps of 16 samples."""
    cfg = tiny_config(str(folder), global_batch_size=16, train_iter=STEPS)
    del cfg["dataloader"]
    cfg.model = libai_data.LazyCall(model_that_notes(seen))()
    cfg.train.dist.tensor_parallel_size = tensor
    cfg.train.evaluation.enabled = False
    libai_data.default_setup(cfg, libai_data.default_argument_parser().parse_args([]))
    return cfg


def batches_of_libai(dataloader: Any) -> Iterator[dict[str, Any]]:
    """What LiBai's own trainer would give its model; the rows of two global batches."""
    from libai.engine import DefaultTrainer

    dataloader.train.train_batch_size = 16 // libai_data.get_data_parallel_size()
    loader, _, _ = libai_data.instantiate(dataloader.train)
    for _, batch in zip(range(STEPS), loader):
        yield DefaultTrainer.get_batch(batch)


def run(section: str, program: str, folder: Path, **given: Any) -> Rows:
    """Run a program, and return the rows that it trained on."""
    seen = Seen()
    names = {"__name__": "__main__", "train_step": seen.train_step}
    if "cfg" in program:
        names["cfg"] = our_config(folder, seen, given.pop("tensor", 1))
    names.update(given)
    exec(compile(program, f"From {section}", "exec"), names)
    if section == "LiBai":
        for batch in batches_of_libai(names["dataloader"]):
            seen.train_step(**batch)
    return seen.rows


def set_up_libai(data: int, tensor: int) -> None:
    from tests.integrations.libai_job import libai_config  # isort: skip
    from libai.utils import distributed

    distributed.setup_dist_util(libai_config("", data, tensor).train.dist)


def main(folder: Path) -> None:
    rows, tensor = {}, flow.env.get_world_size() // 2
    for section, (_, ours) in programs().items():
        if not is_installed(section):
            continue
        set_mesh(None)
        if section == "LiBai":
            set_up_libai(2, tensor)
        libai_data.init(data=2, tensor=tensor)
        rows[section] = run(section, ours, folder / section, tensor=tensor)
    if flow.env.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    torch_files = sys.modules.get("torch.distributed.nn.jit.instantiator")
    if torch_files is not None:  # A rank of a pool ends without the clean-up of its temporary folder.
        torch_files._TEMP_DIR.cleanup()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
