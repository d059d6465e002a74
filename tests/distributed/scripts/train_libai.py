"""LiBai's own trainer over our loaders: stopped after 7 steps and resumed, in every way that a project can take us in.

    train_libai.py FOLDER CASE ...

What each rank saw lies in FOLDER/RANK-of-RANKS.json; test_libai.py looks at it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, ClassVar

from tests.integrations.libai_job import SAMPLES, TEST_SAMPLES, LiBaiPoints, libai_config  # isort: skip

import numpy as np
import oneflow as flow
from libai.engine import DefaultTrainer, default_setup
from libai.engine.trainer import HookBase
from libai.evaluation import DatasetEvaluator
from libai.utils import distributed as dist

from libai_data import engine, from_iterable
from libai_data.integrations import libai as inside
from libai_data.mesh.current import get_layer_placement, get_mesh, init, set_mesh, tensor_to_rank0
from libai_data.structures import DistTensorData, Instance
from tests.engine.tiny import TinyDataset, tiny_config

FOLDER = Path(sys.argv[1])
RANK, RANKS = flow.env.get_rank(), flow.env.get_world_size()
STEPS_BEFORE = 7
NUMBERS = {row.tobytes(): number for number, row in enumerate(TinyDataset(SAMPLES).points)}


class Stopped(Exception):
    """Ends a training in the middle."""


class Stop(HookBase):
    """Ends a training after some steps, one more than the last checkpoint was saved after."""

    def after_step(self) -> None:
        if self.trainer.iter == STEPS_BEFORE - 1:
            raise Stopped


def recorded(trainer: Any) -> Any:
    """A trainer class that notes which samples each of its batches holds; `get_batch` is the trainer's own."""

    class Recorded(trainer):
        seen: ClassVar[list[list[int | None]]] = []

        @classmethod
        def get_batch(cls, data: Any, *rest: Any) -> dict[str, Any]:
            inputs: dict[str, Any] = super().get_batch(data, *rest)
            points = tensor_to_rank0(inputs["points"], to_local=True)
            if RANK == 0:
                numbers = [NUMBERS.get(row.tobytes()) for row in points.numpy()]
                # None are those of the test dataset.
                cls.seen += [numbers] if any(number is not None for number in numbers) else []
            return inputs

    return Recorded


class TwoLines(inside.DataPipeline, DefaultTrainer):
    """What a user writes."""


class OwnLoader(DefaultTrainer):
    """A user's own `build_train_loader`, of an iterable."""

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        dataset = TinyDataset(SAMPLES)
        loader = from_iterable(
            dataset, cfg.train.train_micro_batch_size, shuffle=True, seed=cfg.train.seed, ends="cycle"
        )
        return inside.LiBaiLoader(loader), None, None


def trained(kind: Any, cfg: Any) -> dict[str, Any]:
    """Train, stop, and resume with a trainer and loaders that are made anew."""
    parts = {}
    for name in ("first", "resumed"):
        trainer = recorded(kind)
        default_setup(cfg, SimpleNamespace(resume=name == "resumed"))
        running = trainer(cfg)
        if name == "first":
            running.register_hooks([Stop()])
        with contextlib.suppress(Stopped):
            running.train()
        parts[name] = {"start": running.start_iter, "seen": trainer.seen}
        if hasattr(running.train_loader, "close"):
            running.train_loader.close()
        cfg.train.train_iter = 9
    return parts


def changed(cfg: Any, **arguments: Any) -> Any:
    for name, value in arguments.items():
        cfg.dataloader.train[name] = value
    return cfg


def checkpoint_without_data() -> dict[str, Any]:
    """Goes on from a checkpoint that LiBai saved with its own loader."""
    cfg = libai_config(str(FOLDER / f"moved-{RANKS}"), *SIZES)
    parts = trained(DefaultTrainer, cfg)
    flow.comm.barrier()
    if RANK == 0:
        (FOLDER / f"moved-{RANKS}" / "last_checkpoint").write_text("model_0000005")
    flow.comm.barrier()
    default_setup(cfg, SimpleNamespace(resume=True))
    trainer = recorded(TwoLines)
    running = trainer(cfg)
    running.train()
    running.train_loader.close()
    return {"libai": parts, "moved": {"start": running.start_iter, "seen": trainer.seen}}


def elastic(other: Path, own: Path, data: int, tensor: int) -> dict[str, Any]:
    """Goes on from the checkpoint of another mesh, if that has been here before."""
    if not other.exists():
        return {}
    if RANK == 0:
        shutil.copytree(other, own)
        (own / "last_checkpoint").write_text("model_0000005")
    flow.comm.barrier()
    cfg = libai_config(str(own), data, tensor)
    default_setup(cfg, SimpleNamespace(resume=True))
    trainer = recorded(TwoLines)
    running = trainer(cfg)
    running.train()
    return {"start": running.start_iter, "seen": trainer.seen}


def datasets_made() -> dict[str, int]:
    """How many ranks make the dataset, in each read mode."""
    made = {}
    for readers in ("every_rank", "node", "rank0"):
        cfg = changed(config("made"), readers=readers)
        default_setup(cfg, SimpleNamespace(resume=False))
        loader = TwoLines.build_train_loader(cfg)[0]
        own = flow.tensor([int(isinstance(loader.dataset, TinyDataset))])
        everywhere = own.to_global(placement=flow.placement("cpu", list(range(RANKS))), sbp=flow.sbp.partial_sum)
        made[readers] = int(everywhere.to_global(sbp=flow.sbp.broadcast).to_local().numpy()[0])
        loader.close()
    return made


class Long:
    """Long samples, of which a rank may read a part."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return Instance(tokens=DistTensorData(np.arange(8) + 100 * index, ["split_0", "split_1"]))

    def read_batch(self, indices: Any, out: Any, parts: Any) -> None:
        for row, index in enumerate(indices):
            out["tokens"][row] = (np.arange(8) + 100 * index)[parts.get("tokens", slice(None))]


def field_by_field() -> dict[str, Any]:
    """LiBai's `get_batch`, which makes each field global by itself."""
    cfg = config("fields")
    default_setup(cfg, SimpleNamespace(resume=False))
    loader = inside.build_nlp_train_loader(Long(), 8 // SIZES[0], num_workers=0)[0]
    inputs = DefaultTrainer.get_batch(next(iter(loader)))
    tokens = tensor_to_rank0(inputs["tokens"], to_local=True)
    whole = RANK != 0 or bool((tokens.numpy() % 100 == np.arange(8)).all() and tokens.shape[0] == 8)
    loader.close()
    loader = inside.build_nlp_train_loader(TinyDataset(SAMPLES), 8 // SIZES[0], readers="node", num_workers=0)[0]
    own = DefaultTrainer.get_batch(next(iter(loader)))["points"].to_local()
    before = own.numpy().copy()
    flow.comm.barrier()
    if RANK in (0, 2):
        own.add_(100.0)
    flow.comm.barrier()
    untouched = flow.tensor([int(RANK in (0, 2) or bool((own.numpy() == before).all()))])
    everywhere = untouched.to_global(placement=flow.placement("cpu", list(range(RANKS))), sbp=flow.sbp.partial_sum)
    count = int(everywhere.to_global(sbp=flow.sbp.broadcast).to_local().numpy()[0])
    loader.close()
    return {"parts": whole, "own copy": count == RANKS}


class Echo(flow.nn.Module):
    """Its outputs are its inputs, so that an evaluator can tell whether they are still paired."""

    def forward(self, points: Any, labels: Any) -> dict[str, Any]:
        return {"prediction_scores": points * 1.0}


class Pairs(DatasetEvaluator):
    """Notes the samples, and whether outputs belong to inputs; LiBai's kind of evaluator."""

    def reset(self) -> None:
        self.rows: list[list[float]] = []
        self.paired = True

    def process(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        points = inputs["points"].numpy()
        self.rows += points.tolist()
        self.paired &= bool((points == outputs["prediction_scores"].numpy()).all())

    def evaluate(self) -> dict[str, Any]:
        return {"rows": self.rows, "paired": self.paired}


def evaluated(data: int, tensor: int) -> dict[str, Any]:
    """LiBai's `test`, over each sample of a dataset that does not divide by the ranks."""
    cfg = libai_config(str(FOLDER / f"evaluated-{data}"), data, tensor)
    default_setup(cfg, SimpleNamespace(resume=False))
    loaders = TwoLines.build_test_loader(cfg)
    results = TwoLines.test(cfg, loaders, Echo(), Pairs())
    expected = TinyDataset(TEST_SAMPLES, seed=1).points
    if RANK == 0:
        rows = np.asarray(results["rows"], dtype=np.float32)
        same = sorted(map(tuple, rows)) == sorted(map(tuple, expected))
        return {"each once": same, "paired": results["paired"]}
    return {}


def on_pipeline() -> dict[str, Any]:
    """Inputs on the first stage and labels on the last, where LiBai 0.1 mixes up the shards."""
    cfg = libai_config(str(FOLDER / "pipeline"), 2, 1)
    cfg.train.dist.pipeline_parallel_size = 2
    default_setup(cfg, SimpleNamespace(resume=False))
    mesh = get_mesh()
    cfg.dataloader.train.dataset["_target_"] = LiBaiPoints
    loader = TwoLines.build_train_loader(cfg)[0]
    paired = []
    for _, batch in zip(range(3), loader):
        inputs = TwoLines.get_batch(batch)
        points, labels = (tensor_to_rank0(inputs[name], to_local=True) for name in ("points", "labels"))
        if RANK == 0:
            paired.append(bool((points.numpy()[:, :3].argmax(1) == labels.numpy()).all()))
    loader.close()
    sizes = [mesh.data_parallel_size, mesh.tensor_parallel_size, mesh.pipeline_parallel_size]
    stages = [mesh.layer_stage(layer) for layer in range(4)]
    theirs = [dist.get_dist_util().get_layer_stage_id(layer) for layer in range(4)]
    return {"paired": paired, "sizes": sizes, "same stages": stages == theirs}


def of_our_trainer() -> dict[str, Any]:
    """The batches of this package's own trainer, and the mesh on which it places LiBai's layers."""
    dist._DIST_UTIL = None
    cfg = tiny_config(str(FOLDER / f"ours-{RANKS}"), train_iter=9, seed=5)
    cfg.train.dist.update(data_parallel_size=SIZES[0], tensor_parallel_size=SIZES[1])
    cfg.dataloader.train.dataset.length = SAMPLES
    cfg.train.evaluation.enabled = False
    engine.default_setup(cfg)
    trainer = recorded(engine.DefaultTrainer)
    trainer(cfg).train()
    set_mesh(None)
    libais = dist.get_dist_util()
    return {"seen": trainer.seen, "LiBai's mesh": [libais.data_parallel_size, libais.tensor_parallel_size]}


def on_our_pipeline() -> dict[str, Any]:
    """The ranks of three layers on two stages, for LiBai's layers and for ours."""
    dist._DIST_UTIL = None
    mesh = init(data=2, pipeline=2, layers=3)
    theirs = [dist.get_layer_placement(layer, "cpu") for layer in range(3)]
    ours = [get_layer_placement(layer, "cpu") for layer in range(3)]
    set_mesh(None)
    return {"same": theirs == ours, "stages": [mesh.layer_stage(layer) for layer in range(3)]}


SIZES = {1: (1, 1), 4: (2, 2)}[RANKS]


def config(name: str, **options: Any) -> Any:
    return libai_config(str(FOLDER / f"{name}-{RANKS}"), *SIZES, **options)


def two_lines(readers: str, **options: Any) -> dict[str, Any]:
    return trained(TwoLines, changed(config(f"two lines, {readers}", **options), readers=readers))


def no_line(workers: int) -> dict[str, Any]:
    """The config names our builder, and the trainer is LiBai's as it is; a worker takes seconds to import LiBai."""
    cfg = config(f"no line, {workers} workers")
    return trained(DefaultTrainer, changed(cfg, _target_=inside.build_image_train_loader, num_workers=workers))


def evaluating() -> dict[str, Any]:
    """With LiBai's evaluation and best checkpoint in between, which use the loaders too."""
    cfg = changed(config("evaluating"), readers="node")
    cfg.train.evaluation.enabled = True
    return trained(TwoLines, cfg)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "every_rank": lambda: two_lines("every_rank"),
    "node": lambda: two_lines("node"),
    "rank0": lambda: two_lines("rank0"),
    "no line": lambda: no_line(0),
    "no line, a worker": lambda: no_line(1),
    "own loader": lambda: trained(OwnLoader, config("own loader")),
    "graph": lambda: trained(TwoLines, config("graph", graph=True)),
    "evaluating": evaluating,
    "checkpoint without data": checkpoint_without_data,
    "elastic": lambda: elastic(FOLDER / f"two lines, node-{5 - RANKS}", FOLDER / f"elastic-{RANKS}", *SIZES),
    "another mesh": lambda: elastic(FOLDER / f"two lines, node-{RANKS}", FOLDER / f"mesh-{RANKS}", RANKS, 1),
    "evaluated": lambda: evaluated(RANKS, 1),
    "datasets made": datasets_made,
    "our trainer": of_our_trainer,
}
if RANKS == 4:
    CASES.update({"pipeline": on_pipeline, "our pipeline": on_our_pipeline, "field by field": field_by_field})


def main() -> None:
    found = {name: case() for name, case in CASES.items() if name in sys.argv[2:]}
    (FOLDER / f"{RANK}-of-{RANKS}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
