"""Datasets: samples as Instances, keyed to the arguments of `model.forward`."""

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
    "BertDataset": "libai_data.data.datasets.bert",
    "Blend": "libai_data.data.datasets.blend",
    "BlendedDataset": "libai_data.data.datasets.blend",
    "CIFAR100Dataset": "libai_data.data.datasets.image_datasets",
    "CIFAR10Dataset": "libai_data.data.datasets.image_datasets",
    "ChatDataset": "libai_data.data.datasets.chat",
    "ConcatDataset": "libai_data.data.datasets.combine",
    "FashionMNISTDataset": "libai_data.data.datasets.image_datasets",
    "FilteredDataset": "libai_data.data.datasets.stream_transform",
    "GPTDataset": "libai_data.data.datasets.gpt",
    "ImageFolderDataset": "libai_data.data.datasets.image_datasets",
    "ImageNetDataset": "libai_data.data.datasets.image_datasets",
    "LabelledImages": "libai_data.data.datasets.labelled_images",
    "MNISTDataset": "libai_data.data.datasets.image_datasets",
    "Map": "libai_data.data.datasets.mapped",
    "OneRound": "libai_data.data.datasets.one_round",
    "PackedDataset": "libai_data.data.datasets.packing",
    "PreferenceDataset": "libai_data.data.datasets.chat",
    "RandomMap": "libai_data.data.datasets.mapped",
    "RandomPart": "libai_data.data.datasets.combine",
    "RobertaDataset": "libai_data.data.datasets.bert",
    "StreamTransform": "libai_data.data.datasets.stream_transform",
    "Subset": "libai_data.data.datasets.combine",
    "T5Dataset": "libai_data.data.datasets.t5",
    "cu_seqlens": "libai_data.data.datasets.packing",
    "random_split": "libai_data.data.datasets.combine",
}

__all__ = list(_MODULES)
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
