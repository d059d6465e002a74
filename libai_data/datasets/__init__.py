"""Datasets: samples as Instances, keyed to the arguments of `model.forward`."""

from libai_data.datasets.combine import ConcatDataset, Subset
from libai_data.datasets.image_folder import ImageFolderDataset

__all__ = ["ConcatDataset", "ImageFolderDataset", "Subset"]
