"""Transforms: from what lies on disk to what a model wants."""

from libai_data.transforms.image import ImageToFloat

__all__ = ["ImageToFloat"]
