"""A dataset and a model that train in milliseconds, on any number of data-parallel ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow
from omegaconf import DictConfig, OmegaConf
from oneflow import nn

from libai_data.config import LazyCall, default_graph, default_train
from libai_data.delivery.build import build_image_test_loader, build_image_train_loader
from libai_data.engine.evaluation import ClsEvaluator
from libai_data.engine.graph import GraphBase
from libai_data.engine.optim import get_default_optimizer_params
from libai_data.engine.scheduler import WarmupCosineLR
from libai_data.structures import DistTensorData, Instance

FEATURES = 6
CLASSES = 3
GRAPH_BALLAST = 384


class TinyDataset:
    """Points whose class is the largest of their first three coordinates."""

    def __init__(self, length: int = 40, seed: int = 0) -> None:
        self.points = np.random.default_rng(seed).standard_normal((length, FEATURES)).astype(np.float32)
        self.labels = self.points[:, :CLASSES].argmax(axis=1).astype(np.int64)

    def __len__(self) -> int:
        return len(self.points)

    @property
    def shard_lengths(self) -> list[int]:
        return np.bincount(np.arange(len(self)) // 10).tolist()

    def __getitem__(self, index: int) -> Instance:
        return Instance(
            points=DistTensorData(self.points[index]), labels=DistTensorData(self.labels[index], placement_idx=-1)
        )


class TinyModel(nn.Module):
    """Two linear layers.

    Args:
        ballast: size of a matrix product that adds nothing but milliseconds. OneFlow 0.9 corrupts its memory when a
            graph has finished before its launch has (`LazyJobStreamPolicy::DequeueNNGraph`), which happens to graphs as
            small as this.
    """

    def __init__(self, hidden: int = 8, ballast: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.register_buffer("ballast", flow.zeros(ballast, ballast) if ballast else None, persistent=False)
        self.first = nn.Linear(FEATURES, hidden)
        self.second = nn.Linear(hidden, CLASSES)
        rng = np.random.default_rng(7)
        for parameter in self.parameters():
            values = 0.3 * rng.standard_normal(tuple(parameter.shape)).astype(np.float32)
            parameter.data.copy_(flow.from_numpy(values))

    def forward(self, points: Any, labels: Any | None = None) -> dict[str, Any]:
        """Mean loss of a batch in training, scores in evaluation."""
        scores = self.second(self.dropout(flow.relu(self.first(points))))
        if self.ballast is not None:
            scores = scores + flow.matmul(self.ballast, self.ballast).sum()
        if self.training and labels is not None:
            loss = flow._C.sparse_softmax_cross_entropy(scores, labels).mean()
            return {"loss": loss}
        return {"prediction_scores": scores}


def on_one_rank(model: Any) -> Any:
    """Make the parameters of a model global."""
    model.to_global(flow.placement("cpu", [0]), [flow.sbp.broadcast])
    return model


def weights(model: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def assert_equal_weights(model: Any, expected: dict[str, np.ndarray]) -> None:
    found = weights(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def tiny_config(output_dir: str, **train: Any) -> DictConfig:
    """A whole config: 12 steps of 8 samples, an evaluation and a checkpoint every 5, each step logged.

    Args:
        **train: other keys of `train`; "graph" turns graph mode on.
    """
    graph_mode = train.pop("graph", False)
    cfg = DictConfig({"train": default_train(), "graph": default_graph()}, flags={"allow_objects": True})
    cfg.graph.enabled = graph_mode
    cfg.graph.train_graph = LazyCall(GraphBase)(is_train=True)
    cfg.graph.eval_graph = LazyCall(GraphBase)(is_train=False)
    cfg.model = LazyCall(TinyModel)(ballast=GRAPH_BALLAST if graph_mode else 0)
    cfg.optim = LazyCall(flow.optim.AdamW)(
        params=LazyCall(get_default_optimizer_params)(
            clip_grad_max_norm=1.0, clip_grad_norm_type=2.0, weight_decay_bias=0.0
        ),
        lr=0.02,
        weight_decay=0.1,
    )
    cfg.dataloader = {
        "train": LazyCall(build_image_train_loader)(dataset=LazyCall(TinyDataset)(length=40), num_workers=0),
        "test": [LazyCall(build_image_test_loader)(dataset=LazyCall(TinyDataset)(length=21, seed=1), num_workers=0)],
    }
    OmegaConf.update(
        cfg,
        "train",
        {
            "output_dir": output_dir,
            "train_micro_batch_size": None,
            "global_batch_size": 8,
            "test_micro_batch_size": 4,
            "train_iter": 12,
            "log_period": 1,
            "warmup_ratio": 0.25,
            "input_placement_device": "cpu",
        },
    )
    cfg.train.scheduler = LazyCall(WarmupCosineLR)(warmup_factor=0.1, alpha=0.01, warmup_method="linear")
    cfg.train.evaluation.evaluator = LazyCall(ClsEvaluator)(topk=(1, 2))
    cfg.train.evaluation.eval_period = 5
    cfg.train.checkpointer.period = 5
    cfg.train.checkpointer.max_to_keep = 2
    OmegaConf.update(cfg, "train", train)
    return cfg
