"""A classifier trained by its config on files in the layout of CIFAR-100."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.config import LazyConfig, get_config, instantiate
from libai_data.mesh import ParallelMesh, set_mesh
from tests.data.sources.published_files import jpeg
from tests.deadline import run_to_end

STEPS = 30
SMALL = ["model.dim=32", "model.depth=2", "model.num_heads=2", "model.patch_size=8", "train.dist.pipeline_num_layers=2"]


def write_two_classes(root: Path) -> None:
    """Dark pictures of class 10, and bright ones of class 70, with some noise."""
    folder = root / "cifar-100-binary"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, count in (("train.bin", 192), ("test.bin", 50)):
        bright = np.arange(count) % 2
        records = generator.integers(0, 100, (count, 2 + 3072)) + 150 * bright[:, None]
        records[:, 0], records[:, 1] = bright, np.where(bright, 70, 10)
        (folder / name).write_bytes(records.astype(np.uint8).tobytes())
    (folder / "fine_label_names.txt").write_text("".join(f"class{number}\n" for number in range(100)))


@pytest.mark.slow
def test_a_config_in_the_form_of_libai_trains_on_cifar_with_mixed_labels(repository: Path, tmp_path: Path) -> None:
    write_two_classes(tmp_path / "data")
    overrides = [
        f"dataloader.train.dataset.0.root={tmp_path / 'data'}",
        f"dataloader.test.0.dataset.root={tmp_path / 'data'}",
        "dataloader.train.num_workers=1",
        "dataloader.test.0.num_workers=0",
        f"train.output_dir={tmp_path / 'output'}",
        f"train.train_iter={STEPS}",
        "train.train_epoch=0",
        "train.evaluation.eval_after_n_epoch=null",
        f"train.evaluation.eval_period={STEPS}",
        "train.checkpointer.save_model_after_n_epoch=null",
        "train.log_period=1",
        *SMALL,
    ]
    command = [sys.executable, "tools/train_net.py", "--config-file", "configs/vit_cifar100.py", *overrides]
    done = run_to_end(command, 150, cwd=repository, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "output" / "metrics.json").read_text().splitlines()]
    losses = [row["total_loss"] for row in rows if "total_loss" in row]
    # From log(100) down, for two of the classes occur; mixed labels keep an entropy of their own.
    assert losses[0] > 4 and losses[-1] < 2.5
    scores = [row["Acc@1"] for row in rows if "Acc@1" in row]
    assert scores[-1] > 90


def first_batches(dataloader: Any) -> list[Any]:
    """The first batch of the training loader that a section describes, and of its test loader."""
    set_mesh(ParallelMesh(1, 1, 1))
    train, _, _ = instantiate(dataloader.train, train_batch_size=4, num_workers=0)
    test = instantiate(dataloader.test[0], test_batch_size=4, num_workers=0)
    with contextlib.closing(train), contextlib.closing(test):
        return [next(iter(train)), next(iter(test))]


def test_the_config_of_imagenet_gives_batches_with_mixed_labels(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for name in ("n01", "n02"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(4):
                (tmp_path / part / name / f"{number}.JPEG").write_bytes(jpeg(20 * number, (260, 300)))
    dataloader = get_config("common/data/imagenet.py").dataloader
    for config in (dataloader.train.dataset[0], dataloader.test[0].dataset):
        config.root = str(tmp_path)
    train, test = first_batches(dataloader)
    for batch, labels in ((train, (4, 1000)), (test, (4,))):
        assert tuple(batch.images.tensor.shape) == (4, 3, 224, 224)
        assert tuple(batch.labels.tensor.shape) == labels


PASTED = """
from flowvision import transforms
from flowvision.transforms import InterpolationMode
from omegaconf import OmegaConf

from libai_data.delivery.build import build_image_test_loader, build_image_train_loader
from libai_data.config import LazyCall
from libai_data.data.datasets import CIFAR100Dataset

train_aug = LazyCall(transforms.Compose)(
    transforms=[
        LazyCall(transforms.RandomResizedCrop)(
            size=(24, 24), scale=(0.64, 1.0), ratio=(1.0, 1.0), interpolation=InterpolationMode.BICUBIC
        ),
        LazyCall(transforms.RandomHorizontalFlip)(p=0.5),
        LazyCall(transforms.ToTensor)(),
        LazyCall(transforms.Normalize)(mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2)),
    ]
)
dataloader = OmegaConf.create()
dataloader.train = LazyCall(build_image_train_loader)(
    dataset=[LazyCall(CIFAR100Dataset)(root="./", train=True, download=True, transform=train_aug)],
)
dataloader.test = [
    LazyCall(build_image_test_loader)(
        dataset=LazyCall(CIFAR100Dataset)(root="./", train=False, download=True, transform=train_aug),
    )
]
"""


def test_a_config_of_libai_runs_with_our_names_and_the_transforms_of_flowvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_two_classes(tmp_path)
    (tmp_path / "pasted.py").write_text(PASTED)
    monkeypatch.chdir(tmp_path)
    for batch in first_batches(LazyConfig.load("pasted.py").dataloader):
        assert tuple(batch.images.tensor.shape) == (4, 3, 24, 24)
        assert set(batch.labels.tensor.numpy().tolist()) <= {10, 70}
