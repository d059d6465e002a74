"""The `train` section: how long, how much and how often. `default_train` describes each key."""

from libai_data.config import LazyCall, default_train
from libai_data.engine.evaluation import ClsEvaluator
from libai_data.engine.scheduler import WarmupCosineLR

train = default_train()
train.evaluation.evaluator = LazyCall(ClsEvaluator)(topk=(1, 5))
# `max_iter` and `warmup_iter` are filled in from train_iter and warmup_ratio.
train.scheduler = LazyCall(WarmupCosineLR)(warmup_factor=0.001, alpha=0.01, warmup_method="linear")
