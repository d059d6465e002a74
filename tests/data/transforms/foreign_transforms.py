"""Images transformed by other libraries, in a module that a worker process imports."""

from __future__ import annotations

from typing import Any

import numpy as np

from libai_data.data.transforms import Albumentations, Compose, RandomFlip, Seeded
from libai_data.structures import DistTensorData, Instance


def flowvision_transform() -> Any:
    """Draws from Python's, numpy's and OneFlow's generators."""
    import oneflow  # noqa: F401
    from flowvision import transforms
    from flowvision.data.auto_augment import rand_augment_transform

    parts = [
        transforms.RandomResizedCrop(24),
        transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
        rand_augment_transform("rand-m9-mstd0.5", {}),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ]
    return Seeded(transforms.Compose(parts))


def albumentations_transform() -> Any:
    import albumentations

    parts = [
        albumentations.RandomResizedCrop((24, 24)),
        albumentations.HorizontalFlip(),
        albumentations.OneOf([albumentations.GaussNoise(p=1.0), albumentations.MotionBlur(p=1.0)], p=0.7),
        albumentations.ColorJitter(),
    ]
    return Compose([RandomFlip(), Albumentations(albumentations.Compose(parts))])


def torch_transform() -> Any:
    return Seeded(_torch_noise, takes="array")


def _torch_noise(image: np.ndarray) -> np.ndarray:
    import random

    import torch

    draws = [torch.rand(1).item(), random.random(), np.random.random()]
    return np.asarray([*draws, image.mean()], np.float32)


class Photographs:
    """One photograph for all indices, transformed."""

    def __init__(self, transform: Any, photograph: np.ndarray) -> None:
        self.transform = transform
        self.photograph = photograph

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Instance:
        return Instance(images=DistTensorData(np.asarray(self.transform(self.photograph))))
