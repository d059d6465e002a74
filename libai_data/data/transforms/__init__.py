"""Transforms: from the data on disk to the inputs of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from libai_data import lazy_names

if TYPE_CHECKING:
    from libai_data.data.transforms.batch import BatchTransform as BatchTransform
    from libai_data.data.transforms.colour import ColorJitter as ColorJitter
    from libai_data.data.transforms.colour import RandomErasing as RandomErasing
    from libai_data.data.transforms.decode import EncodedImage as EncodedImage
    from libai_data.data.transforms.decode import decode_image as decode_image
    from libai_data.data.transforms.fill_in_the_middle import FillInTheMiddle as FillInTheMiddle
    from libai_data.data.transforms.foreign import Albumentations as Albumentations
    from libai_data.data.transforms.foreign import Seeded as Seeded
    from libai_data.data.transforms.geometry import CenterCrop as CenterCrop
    from libai_data.data.transforms.geometry import RandomFlip as RandomFlip
    from libai_data.data.transforms.geometry import RandomResizedCrop as RandomResizedCrop
    from libai_data.data.transforms.geometry import Resize as Resize
    from libai_data.data.transforms.image import ImageToFloat as ImageToFloat
    from libai_data.data.transforms.mixup import Mixup as Mixup
    from libai_data.data.transforms.pipeline import Compose as Compose
    from libai_data.data.transforms.pipeline import RandomTransform as RandomTransform
    from libai_data.data.transforms.pipeline import pixels_of as pixels_of
    from libai_data.data.transforms.rand_augment import RandAugment as RandAugment

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

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
