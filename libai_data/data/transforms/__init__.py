"""Transforms: from the data on disk to the inputs of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from libai_data import lazy_names

if TYPE_CHECKING:
    from libai_data.data.transforms.batch import BatchTransform
    from libai_data.data.transforms.colour import ColorJitter, RandomErasing
    from libai_data.data.transforms.decode import EncodedImage, decode_image
    from libai_data.data.transforms.fill_in_the_middle import FillInTheMiddle
    from libai_data.data.transforms.foreign import Albumentations, Seeded
    from libai_data.data.transforms.geometry import CenterCrop, RandomFlip, RandomResizedCrop, Resize
    from libai_data.data.transforms.image import ImageToFloat
    from libai_data.data.transforms.mixup import Mixup
    from libai_data.data.transforms.pipeline import Compose, RandomTransform, pixels_of
    from libai_data.data.transforms.rand_augment import RandAugment

_MODULES = {
    name: f"libai_data.data.transforms.{module}"
    for module, names in {
        "batch": "BatchTransform",
        "colour": "ColorJitter RandomErasing",
        "decode": "EncodedImage decode_image",
        "fill_in_the_middle": "FillInTheMiddle",
        "foreign": "Albumentations Seeded",
        "geometry": "CenterCrop RandomFlip RandomResizedCrop Resize",
        "image": "ImageToFloat",
        "mixup": "Mixup",
        "pipeline": "Compose RandomTransform pixels_of",
        "rand_augment": "RandAugment",
    }.items()
    for name in names.split()
}

__all__ = [
    "BatchTransform",
    "ColorJitter",
    "RandomErasing",
    "EncodedImage",
    "decode_image",
    "FillInTheMiddle",
    "Albumentations",
    "Seeded",
    "CenterCrop",
    "RandomFlip",
    "RandomResizedCrop",
    "Resize",
    "ImageToFloat",
    "Mixup",
    "Compose",
    "RandomTransform",
    "pixels_of",
    "RandAugment",
]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
