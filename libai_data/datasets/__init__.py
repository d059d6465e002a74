"""Datasets: samples as Instances, keyed to the arguments of `model.forward`."""

from libai_data.datasets.bert import BertDataset
from libai_data.datasets.blend import Blend, BlendedDataset
from libai_data.datasets.combine import ConcatDataset, Subset
from libai_data.datasets.gpt import GPTDataset
from libai_data.datasets.image_folder import ImageFolderDataset
from libai_data.datasets.packing import PackedDataset, cu_seqlens
from libai_data.datasets.random_split import RandomPart, random_split
from libai_data.datasets.roberta import RobertaDataset
from libai_data.datasets.stream_transform import FilteredDataset, StreamTransform
from libai_data.datasets.t5 import T5Dataset

__all__ = [
    "BertDataset",
    "Blend",
    "BlendedDataset",
    "ConcatDataset",
    "FilteredDataset",
    "GPTDataset",
    "ImageFolderDataset",
    "PackedDataset",
    "RandomPart",
    "RobertaDataset",
    "StreamTransform",
    "Subset",
    "T5Dataset",
    "cu_seqlens",
    "random_split",
]
