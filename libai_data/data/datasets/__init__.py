"""Datasets: their samples are Instances, with fields named after the arguments of `model.forward`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from libai_data import lazy_names

if TYPE_CHECKING:
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

_MODULES = {
    name: f"libai_data.data.datasets.{module}"
    for module, names in {
        "bert": "BertDataset RobertaDataset",
        "blend": "Blend BlendedDataset",
        "chat": "ChatDataset PreferenceDataset",
        "combine": "ConcatDataset RandomPart Subset random_split",
        "gpt": "GPTDataset",
        "image_datasets": "CIFAR100Dataset CIFAR10Dataset FashionMNISTDataset "
        "ImageFolderDataset ImageNetDataset MNISTDataset",
        "labelled_images": "LabelledImages",
        "mapped": "Map RandomMap",
        "one_round": "OneRound",
        "packing": "PackedDataset cu_seqlens",
        "stream_transform": "FilteredDataset StreamTransform",
        "t5": "T5Dataset",
    }.items()
    for name in names.split()
}

__all__ = [
    "BertDataset",
    "RobertaDataset",
    "Blend",
    "BlendedDataset",
    "ChatDataset",
    "PreferenceDataset",
    "ConcatDataset",
    "RandomPart",
    "Subset",
    "random_split",
    "GPTDataset",
    "CIFAR100Dataset",
    "CIFAR10Dataset",
    "FashionMNISTDataset",
    "ImageFolderDataset",
    "ImageNetDataset",
    "MNISTDataset",
    "LabelledImages",
    "Map",
    "RandomMap",
    "OneRound",
    "PackedDataset",
    "cu_seqlens",
    "FilteredDataset",
    "StreamTransform",
    "T5Dataset",
]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
