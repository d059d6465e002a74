"""A small vision transformer that learns handwritten digits in a minute or two on a CPU.

bash tools/train.sh tools/train_net.py configs/vit_digits.py 4 train.dist.tensor_parallel_size=2
"""

from omegaconf import DictConfig

from configs.models.vit import VisionTransformer
from libai_data import build_image_test_loader, build_image_train_loader
from libai_data.config import LazyCall, get_config
from libai_data.data.datasets import ImageFolderDataset
from libai_data.data.transforms import ImageToFloat

graph = get_config("common/models/graph.py").graph
optim = get_config("common/optim.py").optim
train = get_config("common/train.py").train

_transform = LazyCall(ImageToFloat)(mean=[0.5], std=[0.5])

dataloader = DictConfig(
    {
        "train": LazyCall(build_image_train_loader)(
            dataset=[LazyCall(ImageFolderDataset)(root="data/digits/train", transform=_transform, mode="L")],
            num_workers=1,
        ),
        "test": [
            LazyCall(build_image_test_loader)(
                dataset=LazyCall(ImageFolderDataset)(root="data/digits/test", transform=_transform, mode="L"),
                num_workers=0,
            )
        ],
    },
    flags={"allow_objects": True},
)

model = LazyCall(VisionTransformer)(
    image_size=8, patch_size=2, in_channels=1, num_classes=10, dim=64, depth=2, num_heads=4
)

optim.lr = 3e-3
optim.weight_decay = 0.05

train.output_dir = "output/vit_digits"
train.train_micro_batch_size = None
train.global_batch_size = 96
train.test_micro_batch_size = 64
train.train_iter = 0
train.train_epoch = 20
train.warmup_ratio = 0.1
train.log_period = 20
train.evaluation.evaluator.topk = [1, 3]
train.evaluation.eval_after_n_epoch = 5
train.checkpointer.save_model_after_n_epoch = 5
train.checkpointer.max_to_keep = 3
train.dist.pipeline_num_layers = model.depth

graph.enabled = False
