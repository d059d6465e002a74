"""Datasets: samples as Instances, keyed to the arguments of `model.forward`."""

from libai_data.data.datasets.bert import BertDataset, RobertaDataset
from libai_data.data.datasets.blend import Blend, BlendedDataset
from libai_data.data.datasets.chat import ChatDataset, PreferenceDataset
from libai_data.data.datasets.combine import ConcatDataset, RandomPart, Subset, random_split
from libai_data.data.datasets.gpt import GPTDataset
from libai_data.data.datasets.image_datasets import (
    CIFAR10Dataset,
    CIFAR100Dataset,
    FashionMNISTDataset,
    ImageFolderDataset,
    ImageNetDataset,
    MNISTDataset,
)
from libai_data.data.datasets.labelled_images import LabelledImages
from libai_data.data.datasets.mapped import Map, RandomMap
from libai_data.data.datasets.one_round import OneRound
from libai_data.data.datasets.packing import PackedDataset, cu_seqlens
from libai_data.data.datasets.stream_transform import FilteredDataset, StreamTransform
from libai_data.data.datasets.t5 import T5Dataset

__all__ = [
    "BertDataset",
    "Blend",
    "BlendedDataset",
    "CIFAR100Dataset",
    "CIFAR10Dataset",
    "ChatDataset",
    "ConcatDataset",
    "FashionMNISTDataset",
    "FilteredDataset",
    "GPTDataset",
    "ImageFolderDataset",
    "ImageNetDataset",
    "LabelledImages",
    "MNISTDataset",
    "OneRound",
    "Map",
    "PackedDataset",
    "PreferenceDataset",
    "RandomMap",
    "RandomPart",
    "RobertaDataset",
    "StreamTransform",
    "Subset",
    "T5Dataset",
    "cu_seqlens",
    "random_split",
]
