"""Images that a small transformer learns, its layers split over the tensor axis, its blocks over stages."""

from __future__ import annotations

from typing import Any

import numpy as np
from omegaconf import DictConfig

from configs.models.vit import VisionTransformer
from libai_data.config import LazyCall
from libai_data.structures import DistTensorData, Instance
from tests.engine.tiny import tiny_config


class TinyImages:
    """Pictures of 4 x 4 pixels in which one of three rows is bright."""

    def __init__(self, length: int = 40, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, 3, length)
        self.images = rng.standard_normal((length, 1, 4, 4)).astype(np.float32)
        self.images[np.arange(length), 0, self.labels] += 2

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Instance:
        return Instance(
            images=DistTensorData(self.images[index]), labels=DistTensorData(self.labels[index], placement_idx=-1)
        )


def image_config(output_dir: str, depth: int, tensor: int = 1, pipeline: int = 1, **train: Any) -> DictConfig:
    """`tiny_config` with a transformer of some blocks, and 9 steps, on a mesh of these sizes."""
    cfg = tiny_config(output_dir, train_iter=9, **train)
    cfg.model = LazyCall(VisionTransformer)(
        image_size=4, patch_size=2, in_channels=1, num_classes=3, dim=8, depth=depth, num_heads=2
    )
    cfg.dataloader.train.dataset = LazyCall(TinyImages)(length=40)
    cfg.dataloader.test[0].dataset = LazyCall(TinyImages)(length=21, seed=1)
    cfg.train.dist.update(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, pipeline_num_layers=depth)
    return cfg
