"""What LiBai's own trainer trains in the tests: a dataset of LiBai's classes, a small model, a whole config."""

from __future__ import annotations

from typing import Any

from tests.integrations import libai_on_cpu  # isort: skip  # noqa: F401

import oneflow as flow
from libai.config import LazyCall
from libai.data import build_image_test_loader, build_image_train_loader
from libai.data.structures import DistTensorData, Instance
from libai.evaluation import ClsEvaluator
from libai.optim import get_default_optimizer_params
from libai.scheduler import WarmupCosineLR
from libai.utils import distributed
from omegaconf import DictConfig, OmegaConf

from libai_data.engine.graph import GraphBase
from tests.engine.tiny import GRAPH_BALLAST, TinyDataset, TinyModel

SAMPLES = 43
"""A number that no global batch divides, so that epochs end within batches."""

TEST_SAMPLES = 21


class LiBaiPoints(TinyDataset):
    """The points of `TinyDataset` in LiBai's own classes, as a dataset of LiBai's users has them."""

    def __getitem__(self, index: int) -> Any:
        return Instance(
            points=DistTensorData(flow.tensor(self.points[index])),
            labels=DistTensorData(flow.tensor(self.labels[index]), placement_idx=-1),
        )


class LiBaiModel(TinyModel):
    """`TinyModel`, made global as LiBai 0.1.1 makes models: it leaves out buffers of modules with parameters below."""

    def __init__(self, ballast: int = 0) -> None:
        super().__init__(ballast=ballast)
        if self.ballast is not None:
            everywhere = distributed.get_nd_sbp([flow.sbp.broadcast, flow.sbp.broadcast])
            place = distributed.get_layer_placement(0)
            self.register_buffer("ballast", self.ballast.to_global(sbp=everywhere, placement=place), persistent=False)


def libai_config(output_dir: str, data: int, tensor: int, graph: bool = False, **train: Any) -> DictConfig:
    """A config of LiBai alone: 9 steps of 8 samples, a checkpoint every 3, each step logged."""
    cfg = DictConfig({"train": {}, "graph": {}}, flags={"allow_objects": True})
    cfg.train = {
        "output_dir": output_dir,
        "train_micro_batch_size": 8 // data,
        "test_micro_batch_size": 4,
        "global_batch_size": 8,
        "num_accumulation_steps": None,
        "train_iter": 9,
        "train_epoch": 0,
        "warmup_ratio": 0,
        "seed": 5,
        "resume": False,
        "load_weight": "",
        "log_period": 1,
        "amp": {"enabled": False},
        "checkpointer": {"period": 3, "max_to_keep": 100},
        "evaluation": {
            "enabled": False,
            "eval_iter": 100,
            "eval_period": 4,
            "eval_metric": "Acc@1",
            "eval_mode": "max",
        },
        "dist": {
            "data_parallel_size": data,
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": 1,
            "pipeline_num_layers": 4,
            "device_type": "cpu",
        },
        "input_placement_device": "cpu",
        "rdma_enabled": False,
    }
    cfg.train.scheduler = LazyCall(WarmupCosineLR)(warmup_factor=0.1, alpha=0.01, warmup_method="linear")
    cfg.train.evaluation.evaluator = LazyCall(ClsEvaluator)(topk=(1, 2))
    cfg.graph = {
        "enabled": graph,
        "debug": -1,
        # LiBai 0.1.1's own was written for OneFlow 0.8, and does not run on 0.9.
        "train_graph": LazyCall(GraphBase)(is_train=True),
        "eval_graph": LazyCall(GraphBase)(is_train=False),
        "auto_parallel": {"enabled": False},
    }
    cfg.model = LazyCall(LiBaiModel)(ballast=GRAPH_BALLAST if graph else 0)
    cfg.optim = LazyCall(flow.optim.AdamW)(
        params=LazyCall(get_default_optimizer_params)(clip_grad_max_norm=1.0, clip_grad_norm_type=2.0),
        lr=0.02,
        weight_decay=0.1,
    )
    cfg.dataloader = {
        "train": LazyCall(build_image_train_loader)(dataset=LazyCall(LiBaiPoints)(length=SAMPLES), num_workers=0),
        "test": [
            LazyCall(build_image_test_loader)(dataset=LazyCall(LiBaiPoints)(length=TEST_SAMPLES, seed=1), num_workers=0)
        ],
    }
    OmegaConf.update(cfg, "train", train)
    return cfg
