"""CIFAR-100 for an image classifier: `root` contains `cifar-100-binary`; download=True downloads it."""

from omegaconf import DictConfig

from libai_data import build_image_test_loader, build_image_train_loader
from libai_data.config import LazyCall
from libai_data.data.datasets import CIFAR100Dataset
from libai_data.data.transforms import Compose, ImageToFloat, Mixup, RandomFlip, RandomResizedCrop

CIFAR100_TRAIN_MEAN = (0.5070751592371323, 0.48654887331495095, 0.4409178433670343)
CIFAR100_TRAIN_STD = (0.2673342858792401, 0.2564384629170883, 0.27615047132568404)

train_aug = LazyCall(Compose)(
    transforms=[
        LazyCall(RandomResizedCrop)(size=32, scale=(0.64, 1.0), ratio=(1.0, 1.0)),
        LazyCall(RandomFlip)(p=0.5),
        LazyCall(ImageToFloat)(mean=CIFAR100_TRAIN_MEAN, std=CIFAR100_TRAIN_STD),
    ]
)
test_aug = LazyCall(ImageToFloat)(mean=CIFAR100_TRAIN_MEAN, std=CIFAR100_TRAIN_STD)

dataloader = DictConfig(
    {
        "train": LazyCall(build_image_train_loader)(
            dataset=[LazyCall(CIFAR100Dataset)(root="data", train=True, download=False, transform=train_aug)],
            num_workers=4,
            mixup_func=LazyCall(Mixup)(
                mixup_alpha=0.8, cutmix_alpha=1.0, prob=1.0, switch_prob=0.5, mode="batch", num_classes=100
            ),
        ),
        "test": [
            LazyCall(build_image_test_loader)(
                dataset=LazyCall(CIFAR100Dataset)(root="data", train=False, download=False, transform=test_aug),
                num_workers=4,
            )
        ],
    },
    flags={"allow_objects": True},
)
