"""Trains the example models on some meshes.

train_models_on_meshes.py OUTPUT.json MESH:MODELS:MODES ...    such as 2x2x1:gpt,vit:eager,graph
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import zlib
from typing import Any

import numpy as np

from libai_data.mesh import current as meshes
from libai_data.mesh.parallel_mesh import ParallelMesh

# Its CUDA libraries are found by the import above.
import oneflow as flow  # isort: skip

from configs.models.gpt import GPT
from configs.models.vit import VisionTransformer
from libai_data.engine.graph import GraphBase

STEPS = 10
"""After which the model is evaluated. One rank alone goes on, to show that the model learns."""
STEPS_OF_ONE_RANK = 30
BATCH = 8
DEPTH = 2
LENGTH = 7
# Models keep 10 classes and 11 tokens, which 4 and 2 ranks do not divide.


def build(name: str) -> tuple[flow.nn.Module, flow.optim.Optimizer]:
    # One optimizer that sees the size of gradients, and one that hardly does but has more state.
    if name == "vit":
        vit = VisionTransformer(
            image_size=8, patch_size=4, in_channels=1, num_classes=10, dim=16, depth=DEPTH, num_heads=4
        )
        return vit, flow.optim.SGD(vit.parameters(), lr=0.05, momentum=0.9)
    # "documents" is a GPT, too, whose samples hold several documents.
    gpt = GPT(vocab_size=11, max_seq_length=8, dim=16, depth=DEPTH, num_heads=4)
    return gpt, flow.optim.AdamW(gpt.parameters(), lr=3e-3)


def global_batch(name: str, step: int) -> dict[str, Any]:
    random = np.random.default_rng(step)
    if name == "vit":
        labels = random.integers(0, 10, BATCH)
        templates = np.random.default_rng(1000).standard_normal((10, 1, 8, 8))
        images = templates[labels] + 0.3 * random.standard_normal((BATCH, 1, 8, 8))
        return {"images": place(images.astype(np.float32), 0), "labels": place(labels, -1)}
    tokens = (random.integers(0, 11, (BATCH, 1)) + 3 * np.arange(LENGTH + 1)) % 11
    batch = {"input_ids": place(tokens[:, :-1], 0), "labels": place(tokens[:, 1:], -1)}
    return {**batch, **_documents(random)} if name == "documents" else batch


def _documents(random: np.random.Generator) -> dict[str, Any]:
    """Samples of two documents each: positions, what tokens see, and which labels count."""
    places = np.arange(LENGTH)
    starts = random.integers(1, LENGTH - 1, (BATCH, 1))
    positions = np.where(places >= starts, places - starts, places)
    number = places >= starts
    seen = (number[:, :, None] == number[:, None]) & (places[:, None] >= places)
    counts = (places != starts - 1).astype(np.float32)
    return {
        "position_ids": place(positions, 0),
        "attention_mask": place(seen, 0),
        "loss_mask": place(counts, -1),
    }


def place(array: np.ndarray, layer_idx: int) -> Any:
    placement = meshes.get_layer_placement(layer_idx)
    everywhere = meshes.get_nd_sbp([flow.sbp.broadcast, flow.sbp.broadcast])
    whole = flow.from_numpy(np.ascontiguousarray(array)).to_global(placement=placement, sbp=everywhere)
    return whole.to_global(sbp=meshes.get_hidden_sbp())


def on_rank0(tensor: Any) -> np.ndarray:
    return meshes.tensor_to_rank0(tensor, to_local=True).numpy()


def digest_of_parameters(model: flow.nn.Module) -> int:
    digest = 0
    for name, parameter in model.named_parameters():
        digest = zlib.crc32(name.encode() + on_rank0(parameter).tobytes(), digest)
    return digest


def train(name: str, mode: str, steps: int) -> dict[str, Any]:
    model, optimizer = build(name)
    digest = digest_of_parameters(model)
    model.train()
    graph = None if mode == "eager" else GraphBase(model, optimizer, activation_checkpoint=mode == "checkpointing")
    losses = []
    for step in range(steps):
        batch = global_batch(name, step)
        if graph is not None:
            loss = graph(**batch)["losses"]
        else:
            loss = model(**batch)["losses"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(on_rank0(loss).tolist())
        if len(losses) == STEPS:
            evaluated = evaluate(model, name)
    return {"parameters": digest, "losses": losses, **evaluated}


def evaluate(model: flow.nn.Module, name: str) -> dict[str, Any]:
    model.eval()
    with flow.no_grad():
        output = model(**global_batch(name, STEPS_OF_ONE_RANK))
    model.train()
    return {"scores": on_rank0(output["prediction_scores"]).tolist(), "evaluation": sorted(output)}


def collectives() -> dict[str, Any]:
    """What the functions of `libai_data.mesh.current` give on a mesh of more than one rank."""
    last = meshes.get_world_size() - 1
    meshes.synchronize()
    received = meshes.broadcast_py_object({"from": meshes.get_rank()}, src=last)
    local = flow.tensor([1.0, 2.0])
    made_global = meshes.convert_to_distributed_default_setting(local)
    module = meshes.convert_to_distributed_default_setting(flow.nn.Linear(2, 2))
    partial = flow.ones(
        2, placement=meshes.get_layer_placement(-1), sbp=meshes.get_nd_sbp([flow.sbp.broadcast, flow.sbp.broadcast])
    )
    return {
        "received": received,
        "global": [made_global.is_global, all(parameter.is_global for parameter in module.parameters())],
        "whole": on_rank0(partial).tolist(),
        "halves": meshes.tensor_to_rank0(partial.to(flow.bfloat16)).to(flow.float32).to_local().tolist(),
        "local_tensor_untouched": meshes.tensor_to_rank0(local) is local,
    }


def main() -> None:
    rank = flow.env.get_rank()
    results = {}
    for argument in sys.argv[2:]:
        shape, models, modes = argument.split(":")
        data, tensor, pipeline = map(int, shape.split("x"))
        stages = tuple(range(DEPTH)) if pipeline > 1 else ()
        meshes.set_mesh(ParallelMesh(data, tensor, pipeline, rank=rank, layer_stage_ids=stages))
        steps = STEPS_OF_ONE_RANK if shape == "1x1x1" else STEPS
        results[f"{shape} collectives"] = collectives()
        for name, mode in itertools.product(models.split(","), modes.split(",")):
            start = time.perf_counter()
            results[f"{shape} {name} {mode}"] = train(name, mode, steps)
            if rank == 0:
                print(f"{shape} {name} {mode}: {time.perf_counter() - start:.1f} s", flush=True)
    if rank == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
