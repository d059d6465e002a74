"""ImageNet for an image classifier: `root` contains the folders `train` and `val`, or the published archives."""

from omegaconf import DictConfig

from libai_data import build_image_test_loader, build_image_train_loader
from libai_data.config import LazyCall
from libai_data.data.datasets import ImageNetDataset
from libai_data.data.transforms import (
    CenterCrop,
    Compose,
    ImageToFloat,
    Mixup,
    RandAugment,
    RandomErasing,
    RandomFlip,
    RandomResizedCrop,
    Resize,
)

IMAGENET_DEFAULT_MEAN = (0.485, 0.456, 0.406)
IMAGENET_DEFAULT_STD = (0.229, 0.224, 0.225)

train_aug = LazyCall(Compose)(
    transforms=[
        LazyCall(RandomResizedCrop)(size=224, scale=(0.08, 1.0)),
        LazyCall(RandomFlip)(p=0.5),
        LazyCall(RandAugment)(number=2, magnitude=9),
        LazyCall(ImageToFloat)(mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD),
        LazyCall(RandomErasing)(p=0.25),
    ]
)
test_aug = LazyCall(Compose)(
    transforms=[
        LazyCall(Resize)(size=256),
        LazyCall(CenterCrop)(size=224),
        LazyCall(ImageToFloat)(mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD),
    ]
)

dataloader = DictConfig(
    {
        "train": LazyCall(build_image_train_loader)(
            dataset=[LazyCall(ImageNetDataset)(root="data/imagenet", train=True, transform=train_aug)],
            num_workers=4,
            mixup_func=LazyCall(Mixup)(
                mixup_alpha=0.8, cutmix_alpha=1.0, prob=1.0, switch_prob=0.5, mode="batch", num_classes=1000
            ),
        ),
        "test": [
            LazyCall(build_image_test_loader)(
                dataset=LazyCall(ImageNetDataset)(root="data/imagenet", train=False, transform=test_aug),
                num_workers=4,
            )
        ],
    },
    flags={"allow_objects": True},
)
