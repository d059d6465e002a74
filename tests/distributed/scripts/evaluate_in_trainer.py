"""Evaluates with collators of the user's own, by the trainer, on each mesh:
`evaluate_in_trainer.py FOLDER few|some|all MESH...`.

Each rank writes `FOLDER/<rank>.json`: mesh -> case and read mode -> metrics and each sample's tokens and scores (of
rank 0), or the error; and "refused" -> the errors of loaders of unequal lengths and of local outputs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Callable

import numpy as np
import oneflow as flow

from configs.models.gpt import GPT
from libai_data.config import LazyCall
from libai_data.delivery import to_global
from libai_data.delivery.build import build_image_test_loader
from libai_data.engine import DefaultTrainer, default_setup
from libai_data.engine.evaluation import ClsEvaluator, DatasetEvaluator, PerplexityEvaluator, inference_on_dataset
from libai_data.engine.output_folder import release_output_folder
from libai_data.errors import DataPipelineError, error_text
from libai_data.loader.collate import PadCollator, trivial_batch_collator
from libai_data.mesh.current import set_mesh, synchronize
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.structures import DistTensorData, Instance
from tests.engine.tiny import tiny_config

VOCABULARY, LENGTH, SAMPLES, MICRO_BATCH = 11, 6, 13, 4
READERS = ("data_parallel", "node", "rank0")


class Sentences:
    """Sequences of tokens, each with a kind and with a tail of its own length."""

    def __init__(self, samples: int = SAMPLES) -> None:
        rng = np.random.default_rng(5)
        self.tokens = rng.integers(0, VOCABULARY, (samples, LENGTH))
        self.tokens[:, 0] = np.arange(samples) % VOCABULARY
        self.tokens[:, 1] = np.arange(samples) // VOCABULARY
        self.kinds = rng.integers(0, VOCABULARY, samples)
        self.labels = np.where(np.arange(samples) % 3 == 1, -1, self.kinds)  # Some do not count.

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Instance:
        return Instance(
            input_ids=DistTensorData(self.tokens[index]),
            kinds=DistTensorData(self.kinds[index], placement_idx=-1),
            labels=DistTensorData(self.labels[index], placement_idx=-1),
        )


class WithTails(Sentences):
    """Sentences with a field that is longer in one sample, and so in one shard of one batch."""

    def __getitem__(self, index: int) -> Instance:
        sample = super().__getitem__(index)
        sample.set("tail", DistTensorData(np.full(1 + 2 * (index == 0), index + 1)))
        return sample


def sharing(table: np.ndarray, sbp: tuple[str, str], first: bool) -> Callable[[list[Instance]], Instance]:
    """A collator that adds a table which all samples share."""

    def collate(samples: list[Instance]) -> Instance:
        batch, shared = trivial_batch_collator(samples), DistTensorData(table, sbp)
        fields = batch.get_fields()
        return Instance(shared=shared, **fields) if first else Instance(**fields, shared=shared)

    return collate


EVERYWHERE, BY_ROWS = ("broadcast", "broadcast"), ("split_0", "broadcast")

COLLATORS: dict[str, Any] = {
    "none": None,
    "padded to one length": PadCollator({"tail": {"max_length": 4, "fixed": True, "value": -1}}),
    "padded to the longest": PadCollator({"tail": {"value": -1, "multiple": 2}}),
    "a mask as first field": sharing(np.arange(4.0, dtype=np.float32)[None], EVERYWHERE, first=True),
    "a mask for each shard": sharing(np.arange(4.0, dtype=np.float32)[None], BY_ROWS, first=True),
    "a table of as many rows as a shard": sharing(np.arange(8.0, dtype=np.float32).reshape(4, 2), BY_ROWS, first=False),
    "a square": sharing(np.tri(LENGTH, dtype=np.float32), EVERYWHERE, first=False),
}

LENGTHS = {"1 sample": 1, "3 samples": 3, "16 samples": 16}
LIMITED = "one batch"
OTHERS = (*LENGTHS, "workers", LIMITED)
"""Cases without a collator."""

CASES = {
    "few": [("none", "data_parallel"), ("a square", "rank0")],
    "some": [
        *((name, "data_parallel") for name in COLLATORS),
        *(("none", "node"), ("a mask as first field", "node")),
        *(("padded to the longest", "rank0"), ("a square", "rank0")),
        *(("1 sample", "rank0"), ("3 samples", "node"), ("16 samples", "every_rank")),
        *(("workers", "every_rank"), (LIMITED, "every_rank")),
    ],
    "all": [(name, readers) for name in (*COLLATORS, *OTHERS) for readers in READERS],
}
"""Cases and read modes of a launch."""


class Scorer(GPT):
    """A small language model that guesses a sequence's kind by its last scores."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, LENGTH, dim=8, depth=4, num_heads=4)

    def forward(  # type: ignore[override]
        self, input_ids: Any, kinds: Any, labels: Any, tail: Any = None, shared: Any = None
    ) -> dict[str, Any]:
        scores = super().forward(input_ids)["prediction_scores"][:, -1]
        tables = {} if shared is None else {"table": shared * 2}
        tails = {} if tail is None else {"sums": (tail * (tail > 0).to(tail.dtype)).sum(dim=1)}
        return {"class_scores": scores, **tables, **tails}


class Seen(DatasetEvaluator):
    """Keeps the samples, the tables that they share, and how often a batch came without one of them."""

    input_fields = ("input_ids", "shared")

    def reset(self) -> None:
        self.samples: list[Any] = []
        self.tables: list[Any] = []

    def process(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        sums = outputs["sums"].numpy().tolist() if "sums" in outputs else [None] * len(inputs["input_ids"])
        rows = zip(inputs["input_ids"].numpy().tolist(), outputs["class_scores"].numpy().tolist(), sums)
        self.samples += list(rows)
        if "shared" in inputs:
            self.tables.append([inputs["shared"].numpy().tolist(), outputs["table"].numpy().tolist()])

    def evaluate(self) -> dict[str, int]:
        return {"samples": len(self.samples)}


def found_on(folder: Path, mesh: str, names: list[tuple[str, str]]) -> dict[str, Any]:
    """What each evaluation on this mesh finds, or the error that ends it."""
    data, tensor, pipeline = map(int, mesh.split("x"))
    cfg: Any = tiny_config(str(folder / mesh), global_batch_size=4, test_micro_batch_size=MICRO_BATCH, train_iter=1)
    cfg.train.dist.update(
        data_parallel_size=data, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, pipeline_num_layers=4
    )
    cfg.model = LazyCall(Scorer)()
    cfg.dataloader.train.dataset = LazyCall(Sentences)()
    cfg.dataloader.test = [
        LazyCall(build_image_test_loader)(
            dataset=LazyCall(WithTails if name.startswith("padded") else Sentences)(samples=LENGTHS.get(name, SAMPLES)),
            collate_fn=COLLATORS.get(name),
            readers=readers,
            num_workers=2 if name == "workers" else 0,
        )
        for name, readers in names
    ]
    set_mesh(None)
    default_setup(cfg)
    trainer = DefaultTrainer(cfg)
    found: dict[str, Any] = {}
    for (name, readers), loader in zip(names, trainer.test_loader):
        seen = Seen()
        cfg.train.evaluation.eval_iter = 1 if name == LIMITED else 1e5
        try:
            evaluators = [ClsEvaluator((1, 3), "class_scores", "kinds"), PerplexityEvaluator("class_scores"), seen]
            metrics = trainer.test(cfg, [loader], trainer.model, evaluators)
            found[f"{name}, {readers}"] = {"metrics": metrics, "samples": seen.samples, "tables": seen.tables}
        except DataPipelineError as error:
            found[f"{name}, {readers}"] = error_text(error)
        synchronize()
    for loader in (trainer.train_loader, *trainer.test_loader):
        loader.close()
    release_output_folder(cfg.train.output_dir)
    set_mesh(None)
    return found


def refused() -> list[str]:
    """The errors of loaders that end one after the other, and of a model whose outputs are local."""
    rank = flow.env.get_rank()
    set_mesh(ParallelMesh(flow.env.get_world_size(), 1, 1, rank=rank))
    model = Scorer()
    batches = list(build_image_test_loader(Sentences(32), MICRO_BATCH, num_workers=0))

    def local(**inputs: Any) -> Any:
        return {name: value.to_local() for name, value in model(**inputs).items()}

    errors = []
    for loader, forward in ((batches[: 2 if rank == 1 else 1], model), (batches, local)):
        try:
            inference_on_dataset(forward, loader, MICRO_BATCH, 1e5, to_global, "cpu", Seen())
        except DataPipelineError as error:
            errors.append(error_text(error))
    set_mesh(None)
    return errors


def main() -> None:
    folder, which, *meshes = sys.argv[1:]
    found: dict[str, Any] = {mesh: found_on(Path(folder), mesh, CASES[which]) for mesh in meshes}
    found["refused"] = refused()
    Path(folder, f"{flow.env.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
