"""Transforms: from the data on disk to the inputs of a model."""

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

__all__ = [
    "Albumentations",
    "BatchTransform",
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "EncodedImage",
    "FillInTheMiddle",
    "ImageToFloat",
    "Mixup",
    "RandAugment",
    "RandomErasing",
    "RandomFlip",
    "RandomResizedCrop",
    "RandomTransform",
    "Resize",
    "Seeded",
    "pixels_of",
    "decode_image",
]
