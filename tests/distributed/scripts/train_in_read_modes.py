"""Trains on 2 x 2 ranks in every read mode: `train_in_read_modes.py FOLDER WAY ...`.

Rank 0 writes `FOLDER/losses.json`: how it trains -> read mode -> the mean loss of each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Callable

import oneflow as flow

from configs.models.vit import VisionTransformer
from libai_data.delivery import to_global
from libai_data.delivery.build import build_image_train_loader
from libai_data.engine.batches import StepInputs
from libai_data.engine.graph import GraphBase
from libai_data.engine.step_trainers import EagerTrainer, GraphTrainer
from libai_data.mesh.current import ParallelMesh, set_mesh, synchronize, tensor_to_rank0
from tests.engine.tiny_images import TinyImages

RANK = flow.env.get_rank()
MODES = ("every_rank", "node", "rank0")
STEPS, MICRO_BATCHES, ROWS = 4, 2, 4


class WritesIntoItsInputs(VisionTransformer):
    """A model that scales its images where they lie."""

    def forward(self, images: Any, labels: Any = None) -> dict[str, Any]:
        images.mul_(0.5)
        outputs: dict[str, Any] = super().forward(images, labels)
        return outputs


def trainer_of(model_class: Callable[..., Any], graph_mode: bool, micro_batches: int) -> tuple[Any, list[Any]]:
    """A trainer of a new model, and the model's parameters."""
    flow.manual_seed(1)
    model = model_class(image_size=4, patch_size=2, in_channels=1, num_classes=3, dim=8, depth=2, num_heads=2)
    parameters = list(model.parameters())
    optimizer = flow.optim.SGD(parameters, lr=0.1)
    if graph_mode:
        graph = GraphBase(model, optimizer, grad_acc_steps=micro_batches)
        return GraphTrainer(graph, [], micro_batches), parameters
    return EagerTrainer(model, [], optimizer, micro_batches), parameters


def losses_of(trainer: Any, readers: str, micro_batches: int) -> list[float]:
    """Losses of a training; a step sees as many samples with and without accumulation."""
    loader, _, _ = build_image_train_loader(
        TinyImages(40), ROWS * MICRO_BATCHES // micro_batches, num_workers=0, seed=3, readers=readers
    )
    trainer.inputs = StepInputs(loader)
    losses: list[float] = []

    def write(loss_dict: dict[str, Any], data_time: float, prefix: str = "") -> None:
        losses.append(float(tensor_to_rank0(sum(loss_dict.values()), to_local=True).numpy().sum()))

    trainer.write_metrics = write
    trainer.max_iter = STEPS
    for trainer.iter in range(STEPS):
        trainer.run_step(to_global, "cpu")
    synchronize()
    loader.close()
    return losses


WAYS: dict[str, tuple[Callable[..., Any], bool, int]] = {
    "eager": (VisionTransformer, False, 1),
    "eager, accumulated": (VisionTransformer, False, MICRO_BATCHES),
    "eager, writing into its inputs": (WritesIntoItsInputs, False, 1),
    "graph": (VisionTransformer, True, 1),
    "graph, accumulated": (VisionTransformer, True, MICRO_BATCHES),
}


def main() -> None:
    set_mesh(ParallelMesh(2, 2, 1, rank=RANK))
    found: dict[str, dict[str, list[float]]] = {}
    trainers = []
    for way in sys.argv[2:]:
        model_class, graph_mode, micro_batches = WAYS[way]
        trainer, parameters = trainer_of(model_class, graph_mode, micro_batches)
        # A graph takes seconds to compile, so that one serves all modes; and all are kept, since each rank's garbage
        # collector would end them at another moment.
        trainers.append(trainer)
        weights = [parameter.detach().clone() for parameter in parameters]
        for readers in MODES:
            with flow.no_grad():
                for parameter, weight in zip(parameters, weights):
                    parameter.copy_(weight)
            found.setdefault(way, {})[readers] = losses_of(trainer, readers, micro_batches)
    if RANK == 0:
        Path(sys.argv[1], "losses.json").write_text(json.dumps(found))
    synchronize()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
