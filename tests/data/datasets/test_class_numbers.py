"""Folders of images that are used together give a number to one class only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from libai_data.commands.train import evaluate
from libai_data.data.datasets import ConcatDataset, ImageFolderDataset, Map, Subset
from libai_data.data.datasets.class_numbers import ClassNumbers, check_class_numbers
from libai_data.engine import DefaultTrainer
from libai_data.errors import CheckpointError, ConfigError
from tests.engine.tiny import TinyDataset, tiny_config


def folder(root: Path, *classes: str, **arguments: Any) -> ImageFolderDataset:
    for name in classes:
        (root / name).mkdir(parents=True)
        Image.new("L", (4, 4)).save(root / name / "a.png")
    return ImageFolderDataset(root, **arguments)


def test_folders_for_training_and_test_in_which_a_number_means_two_classes_are_refused(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path / "output"))
    cfg.dataloader.train.dataset = [folder(tmp_path / "train", "cat", "dog", "fox", "owl")]
    cfg.dataloader.test[0].dataset = folder(tmp_path / "test", "cat", "fox", "newt")
    message = (
        r"class 1 is 'dog' in .*/train, but 'fox' in .*/test. Only one of them has 'dog', 'newt', 'owl' \(3 classes\); "
        "make an empty folder for each missing class, or pass a target_transform"
    )
    with pytest.raises(ConfigError, match=message):
        DefaultTrainer(cfg)


def test_folders_that_are_joined_must_agree_too(tmp_path: Path) -> None:
    both, other = folder(tmp_path / "both", "cat", "dog"), folder(tmp_path / "other", "dog")
    with pytest.raises(ConfigError, match=r"class 0 is 'cat' in .*/both, but 'dog' in .*/other"):
        check_class_numbers([ConcatDataset([both, Subset(other, 0, 1)])])


@pytest.mark.parametrize("wrap", [lambda data: Map(data, dict), lambda data: torch.utils.data.Subset(data, [0])])
def test_folders_below_maps_and_subsets_are_compared(tmp_path: Path, wrap: Any) -> None:
    with pytest.raises(ConfigError, match=r"class 0 is 'cat' in .*/cats, but 'dog' in .*/dogs"):
        check_class_numbers([wrap(folder(tmp_path / "cats", "cat")), folder(tmp_path / "dogs", "dog")])


class Named(TinyDataset):
    def __init__(self, *classes: str) -> None:
        super().__init__(8)
        self.class_to_idx = {name: number for number, name in enumerate(classes)}


def test_an_evaluation_and_a_resume_compare_the_classes_of_the_checkpoint(tmp_path: Path) -> None:
    def config(*classes: str) -> Any:
        cfg = tiny_config(str(tmp_path), train_iter=1)
        cfg.dataloader.train.dataset = [Named(*classes)]
        cfg.dataloader.test[0].dataset = Named(*classes)
        return cfg

    DefaultTrainer(config("cat", "dog", "fox")).train()
    assert "Acc@1" in evaluate(config("cat", "dog"), DefaultTrainer, resume=True)
    with pytest.raises(ConfigError, match="class 1 is 'dog' in the checkpoint, but 'fox' in Named"):
        evaluate(config("cat", "fox"), DefaultTrainer, resume=True)
    resumed = config("cat", "fox")
    resumed.train.resume = True
    with pytest.raises(ConfigError, match="class 1 is 'dog' in the checkpoint, but 'fox' in Named"):
        DefaultTrainer(resumed)


@pytest.mark.parametrize("state", [[], {"cat": "0"}, {"cat": [0]}], ids=str)
def test_class_numbers_of_an_edited_checkpoint_are_refused(state: Any) -> None:
    with pytest.raises(CheckpointError, match="the numbers of classes in the checkpoint are"):
        ClassNumbers([]).load_state_dict(state)


def test_folders_of_equal_numbers_and_datasets_without_names_agree(tmp_path: Path) -> None:
    train = folder(tmp_path / "train", "cat", "dog", "fox")
    fewer = folder(tmp_path / "fewer", "cat", "dog")
    mapped = folder(tmp_path / "mapped", "dog", target_transform=lambda number: number + 1)
    check_class_numbers([train, fewer, mapped, [{"labels": 0}], None])
