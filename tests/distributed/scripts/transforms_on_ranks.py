"""Takes transformed streams and images on one mesh after the other: `transforms_on_ranks.py FOLDER LEGS`.

Each leg has another mesh, read mode or number of workers, and goes on from the state that the last one left. Each rank
writes `FOLDER/<rank>.json`: scenario -> for each leg, a digest of each of its own rows, and its state.
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any, Callable, NamedTuple

import oneflow as flow

from libai_data.data.datasets import BlendedDataset, FilteredDataset, ImageFolderDataset, PackedDataset
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
from libai_data.delivery.build import build_image_train_loader, build_nlp_train_loader
from libai_data.mesh.current import get_mesh, set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from tests.data.samplers.transforms import Documents, Failing, is_even

GLOBAL_BATCH = 8
STEPS = 2
CLASSES = 3
LENGTHS = [3, 9, 1, 14, 0, 6, 2, 8, 11, 5]


class Leg(NamedTuple):
    """A few steps."""

    mesh: tuple[int, int]
    readers: str
    workers: int


LEGS = [
    Leg((4, 1), "every_rank", 0),
    Leg((2, 2), "node", 1),
    Leg((1, 4), "rank0", 0),
    Leg((4, 1), "node", 0),
    Leg((2, 2), "every_rank", 1),
    Leg((4, 1), "rank0", 1),
]

_BYTES = [RandomResizedCrop(24), RandomFlip(), RandAugment(), ColorJitter(0.4, 0.4, 0.4, 0.1)]
_FLOATS = Compose([*_BYTES, ImageToFloat([0.5], [0.25]), RandomErasing()])


def documents() -> Documents:
    return Documents(LENGTHS, random=True)


def fixed(length: int) -> Documents:
    return Documents([length] * 7)


STREAMS: dict[str, Callable[[], Any]] = {
    "blend": lambda: BlendedDataset([fixed(4)] * 3, [0.5, 0.3, 0.2], {40: [0, 1, 1]}),
    "measured": lambda: PackedDataset(documents(), 10),
    "whole, kept": lambda: PackedDataset(documents(), 16, cut=False, keep=is_even),
    "blend, packed": lambda: PackedDataset(BlendedDataset([documents(), documents()], [2, 1]), 10),
    "failing": lambda: PackedDataset(Failing(LENGTHS, [3, 8], random=True), 10),
    "failing, known": lambda: PackedDataset(Failing(LENGTHS, [3, 8]), 10, lengths=LENGTHS),
    "filter": lambda: FilteredDataset(fixed(4), [True, False, True, True, False, True, False]),
}
IMAGES: dict[str, tuple[Compose, str]] = {
    "floats": (_FLOATS, ""),
    "bytes, mixed in batches": (Compose(_BYTES), "batch"),
    "floats, mixed in pairs": (_FLOATS, "pair"),
    "floats, mixed by row": (_FLOATS, "elem"),
}
SCENARIOS = [*STREAMS, *IMAGES]


def rows_of(batch: Any) -> list[str]:
    """A digest of each row."""
    arrays = [value.tensor.numpy() for _, value in sorted(batch.get_fields().items())]
    return [hashlib.sha256(b"".join(field.tobytes() for field in row)).hexdigest() for row in zip(*arrays)]


def loader_of(images: Path, name: str, ranks: int, readers: str, workers: int) -> Any:
    """The train loader of a scenario."""
    options: dict[str, Any] = {"num_workers": workers, "seed": 11, "readers": readers}
    if name in STREAMS:
        options.update(on_error="skip", replacement_budget=1.0)
        return build_nlp_train_loader(STREAMS[name](), GLOBAL_BATCH // ranks, **options)[0]
    transform, mode = IMAGES[name]
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, mode=mode, num_classes=CLASSES) if mode else None
    dataset = ImageFolderDataset(images, transform)
    return build_image_train_loader(dataset, GLOBAL_BATCH // ranks, mixup_func=mixup, **options)[0]


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
                loader.load_state_dict(json.loads(states[name]))
            taken = []
            for batch in islice(iter(loader), STEPS):
                taken.append(rows_of(batch))
                to_global(batch)
            states[name] = json.dumps(loader.state_dict())
            found[name].append([taken, states[name]])
            loader.close()
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
