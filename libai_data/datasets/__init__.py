"""Datasets: samples as Instances, keyed to the arguments of `model.forward`."""

from libai_data.datasets.blend import Blend, BlendedDataset
from libai_data.datasets.combine import ConcatDataset, Subset
from libai_data.datasets.gpt import GPTDataset
from libai_data.datasets.image_folder import ImageFolderDataset
from libai_data.datasets.random_split import RandomPart, random_split

__all__ = [
    "Blend",
    "BlendedDataset",
    "ConcatDataset",
    "GPTDataset",
    "ImageFolderDataset",
    "RandomPart",
    "Subset",
    "random_split",
]
