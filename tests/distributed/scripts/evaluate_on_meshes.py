"""Evaluates on each mesh of this world size: `evaluate_on_meshes.py FOLDER`.

Rank 0 writes `FOLDER/<world size>.json`: mesh -> case -> metrics, and each sample's tokens and scores. On more ranks
than one, loaders of unequal lengths and local tensors are tried too, and on four, the conformance of the read modes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oneflow as flow

from configs.models.gpt import GPT
from libai_data.delivery import to_global
from libai_data.delivery.build import build_image_test_loader, build_nlp_train_loader
from libai_data.engine.evaluation import ClsEvaluator, DatasetEvaluator, PerplexityEvaluator, inference_on_dataset
from libai_data.errors import ContractError, SchemaError
from libai_data.mesh.current import ParallelMesh, broadcast_py_object, get_rank, set_mesh
from libai_data.testing import check_conformance
from tests.distributed.scripts.evaluation_cases import (
    CASES,
    LENGTH,
    MICRO_BATCH,
    VOCABULARY,
    Case,
    Sentences,
    indices_of,
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


class OfRank:
    """The loader of one rank, as all ranks see it: that rank tells what it gets."""

    def __init__(self, rank: int, loader: Any) -> None:
        self._rank, self._loader = rank, loader
        self._state: dict[str, Any] | None = None

    def state_dict(self) -> Any:
        return self._state

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader) if get_rank() == self._rank else None
        while True:
            told = None
            if batches is not None:
                batch = next(batches, None)
                if batch is not None:
                    rows = batch.get("input_ids").tensor.numpy()
                    counting = max(0, batch._origin.info.valid - self._rank * len(rows))
                    told = indices_of(rows)[:counting], self._loader.state_dict()
            told = broadcast_py_object(told, src=self._rank)
            if told is None:
                return
            indices, self._state = told
            yield indices

    def close(self) -> None:
        if get_rank() == self._rank:
            self._loader.close()


def conformance(readers: str, endless: bool) -> str:
    """Check the loaders of this job, each rank its own."""

    def make_loader(rank: int, world: int, state: Any) -> OfRank:
        loader = None
        if rank == get_rank():
            dataset = Sentences(29)
            if endless:
                loader, _, _ = build_nlp_train_loader(dataset, MICRO_BATCH, num_workers=0, readers=readers)
            else:
                loader = build_image_test_loader(dataset, MICRO_BATCH, num_workers=0, readers=readers)
            if state is not None:
                loader.load_state_dict(state)
        return OfRank(rank, loader)

    return str(check_conformance(make_loader, 29, endless=endless, worlds=(4,), title=f"{readers}, endless={endless}"))


def main() -> None:
    rank, world_size = flow.env.get_rank(), flow.env.get_world_size()
    found: dict[str, Any] = {}
    meshes = [name for name in sys.argv[2:] if name[0].isdigit()]
    more = sys.argv[2 + len(meshes) :]
    for mesh in meshes:
        data, tensor, pipeline = map(int, mesh.split("x"))
        set_mesh(ParallelMesh(data, tensor, pipeline, rank=rank, layer_stage_ids=(0, pipeline - 1)))
        model = Scorer()
        found[mesh] = {case.name: evaluate(case, model) for case in CASES}
    if "refusals" in more:
        set_mesh(ParallelMesh(world_size, 1, 1, rank=rank))
        refuse(Scorer())
    if "conformance" in more:
        found["conformance"] = [
            conformance(readers, endless) for readers in ("every_rank", "node", "rank0") for endless in (True, False)
        ]
    if rank == 0:
        Path(sys.argv[1], "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
