"""Datasets: their samples are Instances, with fields named after the arguments of `model.forward`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from libai_data import lazy_names

if TYPE_CHECKING:
    from libai_data.data.datasets.bert import BertDataset as BertDataset
    from libai_data.data.datasets.bert import RobertaDataset as RobertaDataset
    from libai_data.data.datasets.blend import Blend as Blend
    from libai_data.data.datasets.blend import BlendedDataset as BlendedDataset
    from libai_data.data.datasets.chat import ChatDataset as ChatDataset
    from libai_data.data.datasets.chat import PreferenceDataset as PreferenceDataset
    from libai_data.data.datasets.combine import ConcatDataset as ConcatDataset
    from libai_data.data.datasets.combine import RandomPart as RandomPart
    from libai_data.data.datasets.combine import Subset as Subset
    from libai_data.data.datasets.combine import random_split as random_split
    from libai_data.data.datasets.gpt import GPTDataset as GPTDataset
    from libai_data.data.datasets.image_datasets import CIFAR10Dataset as CIFAR10Dataset
    from libai_data.data.datasets.image_datasets import CIFAR100Dataset as CIFAR100Dataset
    from libai_data.data.datasets.image_datasets import FashionMNISTDataset as FashionMNISTDataset
    from libai_data.data.datasets.image_datasets import ImageFolderDataset as ImageFolderDataset
    from libai_data.data.datasets.image_datasets import ImageNetDataset as ImageNetDataset
    from libai_data.data.datasets.image_datasets import MNISTDataset as MNISTDataset
    from libai_data.data.datasets.labelled_images import LabelledImages as LabelledImages
    from libai_data.data.datasets.mapped import Map as Map
    from libai_data.data.datasets.mapped import RandomMap as RandomMap
    from libai_data.data.datasets.one_round import OneRound as OneRound
    from libai_data.data.datasets.packing import PackedDataset as PackedDataset
    from libai_data.data.datasets.packing import cu_seqlens as cu_seqlens
    from libai_data.data.datasets.stream_transform import FilteredDataset as FilteredDataset
    from libai_data.data.datasets.stream_transform import StreamTransform as StreamTransform
    from libai_data.data.datasets.t5 import T5Dataset as T5Dataset

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

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
