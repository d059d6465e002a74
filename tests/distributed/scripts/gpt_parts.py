"""Splits GPT samples along the sequence over tensor ranks, each reading its part: `gpt_parts.py CORPUS OUTPUT.json`."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import oneflow as flow

from libai_data.config import LazyCall
from libai_data.data.datasets import GPTDataset
from libai_data.data.samplers import CyclicSampler
from libai_data.delivery import to_global
from libai_data.delivery.build import build_nlp_train_loader
from libai_data.mesh.current import set_mesh, tensor_to_rank0
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.structures import origin_of

LENGTH, BATCH, STEPS = 32, 8, 3
MESHES = [(1, 4, 1), (2, 2, 1), (1, 2, 2)]
ALONG = {"sbp_list": ["split_0", "split_1"]}
# The mask's rows go with the tokens that see, its columns with those that are seen.
SEEN = {"sbp_list": ["split_0", "split_2"]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"input_ids": ALONG, "labels": ALONG}),
    "shuffled, inputs only": ({"shuffle_documents": True}, {"input_ids": ALONG}),
    "rows of the mask": (
        {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True},
        dict.fromkeys(("input_ids", "labels", "position_ids", "attention_mask", "loss_mask"), ALONG),
    ),
    "columns of the mask": (
        {"reset_attention_mask": True, "pad_last": True},
        {"input_ids": ALONG, "labels": ALONG, "attention_mask": SEEN},
    ),
    "packed": ({"packing": True}, dict.fromkeys(("input_ids", "labels", "position_ids", "loss_mask"), ALONG)),
}


def expected(dataset: GPTDataset) -> list[dict[str, np.ndarray]]:
    """The batches of one rank."""
    batches = CyclicSampler(dataset, BATCH, shuffle=True, seed=3).batches(0)
    found = []
    for _, batch in zip(range(STEPS), batches):
        samples = [dataset[index].get_fields() for index in batch.indices.tolist()]
        found.append({name: np.stack([sample[name].tensor for sample in samples]) for name in samples[0]})
    return found


def check(corpus: str, case: str, readers: str, data: int) -> list[str]:
    """Compare with the truth; returns the fields of which ranks read their parts alone."""
    options, layouts = CASES[case]
    dataset = GPTDataset(corpus, LENGTH, **options)
    loader, _, _ = build_nlp_train_loader(
        dataset,
        BATCH // data,
        sampler=LazyCall(CyclicSampler)(shuffle=True),
        seed=3,
        num_workers=0,
        readers=readers,
        layouts=layouts,
    )
    parts: list[str] = []
    for truth, batch in zip(expected(dataset), loader):
        parts = sorted(origin_of(batch).parts)
        made = to_global(batch)
        assert set(made) == set(truth)
        for name, tensor in made.items():
            whole = tensor_to_rank0(tensor, to_local=True)
            if flow.env.get_rank() == 0:
                np.testing.assert_array_equal(whole.numpy(), truth[name], err_msg=f"{case}: {name}")
    loader.close()
    return parts


def main() -> None:
    found: dict[str, list[str]] = {}
    for data, tensor, pipeline in MESHES:
        stages = (0, 1) if pipeline > 1 else ()
        set_mesh(ParallelMesh(data, tensor, pipeline, rank=flow.env.get_rank(), layer_stage_ids=stages))
        for case in CASES:
            for readers in ("every_rank", "node"):
                found[f"{data}x{tensor}x{pipeline} {readers} {case}"] = check(sys.argv[1], case, readers, data)
    if flow.env.get_rank() == 0:
        with open(sys.argv[2], "w") as file:
            json.dump(found, file)


main()
