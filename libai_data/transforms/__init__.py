"""Transforms: from what lies on disk to what a model wants."""

from libai_data.transforms.batch import BatchTransform
from libai_data.transforms.decode import EncodedImage, decode_image
from libai_data.transforms.image import ImageToFloat
from libai_data.transforms.mixup import Mixup

__all__ = ["BatchTransform", "EncodedImage", "ImageToFloat", "Mixup", "decode_image"]
