"""Takes augmented and mixed images on one mesh after the other: `augmentation_on_ranks.py FOLDER LEGS`.

Each leg has another mesh, read mode or number of workers, and goes on from the state that the last one left. Each rank
writes `FOLDER/<rank>.json`: scenario -> for each leg, a digest of each of its own rows.
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any, Callable

import oneflow as flow

from libai_data.data.datasets import ImageFolderDataset
from libai_data.data.transforms import (
    ColorJitter,
    Compose,
    ImageToFloat,
    Mixup,
    RandAugment,
    RandomErasing,
    RandomFlip,
    RandomResizedCrop,
)
from libai_data.delivery import to_global
from libai_data.delivery.build import build_image_train_loader
from libai_data.mesh.current import ParallelMesh, get_mesh, set_mesh
from tests.distributed.scripts.transforms_on_ranks import LEGS

GLOBAL_BATCH = 8
STEPS = 2
CLASSES = 3

_BYTES = [RandomResizedCrop(24), RandomFlip(), RandAugment(), ColorJitter(0.4, 0.4, 0.4, 0.1)]
_FLOATS = Compose([*_BYTES, ImageToFloat([0.5], [0.25]), RandomErasing()])


def _mixup(mode: str) -> Mixup:
    return Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, mode=mode, num_classes=CLASSES)


SCENARIOS: dict[str, Callable[[], tuple[Compose, Any]]] = {
    "floats": lambda: (_FLOATS, None),
    "bytes, mixed in batches": lambda: (Compose(_BYTES), _mixup("batch")),
    "floats, mixed in pairs": lambda: (_FLOATS, _mixup("pair")),
    "floats, mixed by row": lambda: (_FLOATS, _mixup("elem")),
}


def rows_of(batch: Any) -> list[str]:
    """A digest of each row."""
    arrays = [value.tensor.numpy() for value in batch.get_fields().values()]
    return [hashlib.sha256(b"".join(field.tobytes() for field in row)).hexdigest() for row in zip(*arrays)]


def loader_of(images: Path, name: str, ranks: int, readers: str, workers: int) -> Any:
    """The train loader of a scenario."""
    transform, mixup = SCENARIOS[name]()
    dataset = ImageFolderDataset(images, transform)
    return build_image_train_loader(
        dataset, GLOBAL_BATCH // ranks, num_workers=workers, seed=11, readers=readers, mixup_func=mixup
    )[0]


def main() -> None:
    folder = Path(sys.argv[1])
    rank = flow.env.get_rank()
    found: dict[str, list[Any]] = {name: [] for name in SCENARIOS}
    states: dict[str, Any] = {}
    for leg in LEGS[: int(sys.argv[2])]:
        set_mesh(None)
        set_mesh(ParallelMesh(*leg.mesh, 1, rank=rank))
        for name in SCENARIOS:
            loader = loader_of(folder / "images", name, get_mesh().data_parallel_size, leg.readers, leg.workers)
            if name in states:
                loader.load_state_dict(states[name])
            taken = []
            for batch in islice(iter(loader), STEPS):
                taken.append(rows_of(batch))
                to_global(batch)
            states[name] = loader.state_dict()
            found[name].append(taken)
            loader.close()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    print(f"RANK {rank} DONE", flush=True)


if __name__ == "__main__":
    main()
