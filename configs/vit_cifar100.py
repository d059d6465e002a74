"""A small vision transformer that learns CIFAR-100.

It looks for the binary version in data/cifar-100-binary, and fetches it with download=True below.

bash tools/train.sh tools/train_net.py configs/vit_cifar100.py 4
"""

from configs.models.vit import VisionTransformer
from libai_data.config import LazyCall, get_config

dataloader = get_config("common/data/cifar100.py").dataloader
graph = get_config("common/models/graph.py").graph
optim = get_config("common/optim.py").optim
train = get_config("common/train.py").train

model = LazyCall(VisionTransformer)(
    image_size=32, patch_size=4, in_channels=3, num_classes=100, dim=192, depth=9, num_heads=3
)

dataloader.train.dataset[0].root = dataloader.test[0].dataset.root = "data"
dataloader.train.dataset[0].download = dataloader.test[0].dataset.download = False

optim.lr = 1e-3
optim.weight_decay = 0.05

train.output_dir = "output/vit_cifar100"
train.train_micro_batch_size = 32
train.test_micro_batch_size = 32
train.train_iter = 0
train.train_epoch = 100
train.warmup_ratio = 0.1
train.evaluation.eval_after_n_epoch = 5
train.checkpointer.save_model_after_n_epoch = 5
train.dist.pipeline_num_layers = model.depth

graph.enabled = False
