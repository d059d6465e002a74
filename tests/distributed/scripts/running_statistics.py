"""Evaluates and saves a model whose BatchNorm has other statistics on each rank: `running_statistics.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import oneflow as flow

from libai_data.delivery import to_global
from libai_data.delivery.build import build_image_test_loader
from libai_data.engine.checkpoint import Checkpointer
from libai_data.engine.evaluation import ClsEvaluator, inference_on_dataset
from libai_data.mesh.current import (
    convert_to_distributed_default_setting,
    get_layer_placement,
    get_nd_sbp,
    get_rank,
    get_world_size,
    set_mesh,
)
from libai_data.mesh.parallel_mesh import ParallelMesh
from tests.engine.tiny import FEATURES, TinyDataset, TinyModel

FOLDER = Path(sys.argv[1])


class Model(TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.norm = flow.nn.BatchNorm1d(FEATURES)

    def forward(self, points: Any, labels: Any = None) -> Any:
        return super().forward(self.norm(points), labels)


STAGES = get_world_size() // 2  # of the pipeline; the data axis has 2 ranks
set_mesh(ParallelMesh(2, 1, STAGES, rank=get_rank(), layer_stage_ids=tuple(range(STAGES))))
found: dict[str, Any] = {}
for use in ("evaluate", "save") if STAGES == 1 else ("save",):
    model = Model()
    model._apply(convert_to_distributed_default_setting)
    model.norm.to_global(placement=get_layer_placement(-1), sbp=get_nd_sbp([flow.sbp.broadcast] * 2))
    statistics = model.norm.running_mean, model.norm.running_var
    for each in statistics:
        own = each.to_local()
        if own.numel():
            own.fill_(get_rank() % 2)
    if use == "evaluate":
        loader = build_image_test_loader(TinyDataset(4), 2, num_workers=0)
        inference_on_dataset(model, loader, 4, 1e5, to_global, "cpu", ClsEvaluator((1,)))
    else:
        Checkpointer(model, str(FOLDER)).save("a", iteration=0)
    found[use] = [sorted({*each.to_local().numpy().tolist()}) for each in statistics]
(FOLDER / f"{get_rank()}.json").write_text(json.dumps(found))
