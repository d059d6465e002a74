"""Evaluates on each mesh of this world size: `evaluate_on_meshes.py FOLDER`.

Rank 0 writes `FOLDER/found.json`: mesh -> case -> metrics, and each sample's tokens and scores. With "refusals",
loaders of unequal lengths and local tensors are tried too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import oneflow as flow

from configs.models.gpt import GPT
from libai_data.delivery import to_global
from libai_data.delivery.build import build_image_test_loader
from libai_data.engine.evaluation import ClsEvaluator, DatasetEvaluator, PerplexityEvaluator, inference_on_dataset
from libai_data.errors import ContractError, SchemaError
from libai_data.mesh.current import ParallelMesh, get_rank, set_mesh
from tests.distributed.scripts.evaluation_cases import (
    CASES,
    LENGTH,
    MICRO_BATCH,
    VOCABULARY,
    Case,
    Sentences,
)


class Scorer(GPT):
    """A small language model that also guesses a sequence's kind by its last scores."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, LENGTH, dim=8, depth=2, num_heads=4)

    def forward(self, input_ids: Any, labels: Any, kinds: Any) -> dict[str, Any]:  # type: ignore[override]
        scores = super().forward(input_ids)["prediction_scores"]
        return {"prediction_scores": scores, "class_scores": scores[:, -1]}


class Seen(DatasetEvaluator):
    """A user's own: keeps each sample's tokens with the scores that the model gave it."""

    input_fields = ("input_ids",)

    def reset(self) -> None:
        self.samples: list[Any] = []

    def prepare(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
        return {"scores": outputs["class_scores"]}

    def process(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        self.samples += list(zip(inputs["input_ids"].numpy().tolist(), outputs["scores"].numpy().tolist()))

    def evaluate(self) -> dict[str, int]:
        return {"samples": len(self.samples)}


def evaluate(case: Case, model: Any) -> dict[str, Any]:
    loader = build_image_test_loader(
        Sentences(case.samples), MICRO_BATCH, num_workers=case.workers, readers=case.readers
    )
    seen = Seen()
    evaluators = [ClsEvaluator((1, 3), "class_scores", "kinds"), PerplexityEvaluator(), seen]
    metrics = inference_on_dataset(model, loader, MICRO_BATCH, case.eval_iter, to_global, "cpu", evaluators)
    loader.close()
    return {"metrics": metrics, "seen": seen.samples}


def refuse(model: Any) -> None:
    """Loaders that end one after the other, and a model whose answer is local."""

    def run(loader: Any, forward: Any) -> None:
        try:
            inference_on_dataset(forward, loader, MICRO_BATCH, 1e5, to_global, "cpu", Seen())
        except (ContractError, SchemaError) as error:
            print(f"RANK {get_rank()} HEARD: {error}", flush=True)

    batches = list(build_image_test_loader(Sentences(16), MICRO_BATCH, num_workers=0))
    run(batches[: 2 if get_rank() == 1 else 1], model)
    run(batches, lambda **inputs: {name: value.to_local() for name, value in model(**inputs).items()})


def main() -> None:
    rank, world_size = flow.env.get_rank(), flow.env.get_world_size()
    found: dict[str, Any] = {}
    refuses = sys.argv[-1] == "refusals"
    for mesh in sys.argv[2:-1] if refuses else sys.argv[2:]:
        data, tensor, pipeline = map(int, mesh.split("x"))
        set_mesh(ParallelMesh(data, tensor, pipeline, rank=rank, layer_stage_ids=(0, pipeline - 1)))
        model = Scorer()
        found[mesh] = {case.name: evaluate(case, model) for case in CASES}
    if refuses:
        set_mesh(ParallelMesh(world_size, 1, 1, rank=rank))
        refuse(Scorer())
    if rank == 0:
        Path(sys.argv[1], "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
