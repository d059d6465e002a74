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
    "Albumentations": "libai_data.data.transforms.foreign",
    "BatchTransform": "libai_data.data.transforms.batch",
    "CenterCrop": "libai_data.data.transforms.geometry",
    "ColorJitter": "libai_data.data.transforms.colour",
    "Compose": "libai_data.data.transforms.pipeline",
    "EncodedImage": "libai_data.data.transforms.decode",
    "FillInTheMiddle": "libai_data.data.transforms.fill_in_the_middle",
    "ImageToFloat": "libai_data.data.transforms.image",
    "Mixup": "libai_data.data.transforms.mixup",
    "RandAugment": "libai_data.data.transforms.rand_augment",
    "RandomErasing": "libai_data.data.transforms.colour",
    "RandomFlip": "libai_data.data.transforms.geometry",
    "RandomResizedCrop": "libai_data.data.transforms.geometry",
    "RandomTransform": "libai_data.data.transforms.pipeline",
    "Resize": "libai_data.data.transforms.geometry",
    "Seeded": "libai_data.data.transforms.foreign",
    "decode_image": "libai_data.data.transforms.decode",
    "pixels_of": "libai_data.data.transforms.pipeline",
}

__all__ = list(_MODULES)
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
