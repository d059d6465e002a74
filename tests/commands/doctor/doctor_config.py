"""A config that needs no OneFlow, so that a rank looks at it within a second."""

from libai_data.config import LazyCall, default_train
from libai_data.delivery.build import build_nlp_train_loader
from tests.commands.doctor.data import Numbers

train = default_train()
train["train_micro_batch_size"] = 2
train["train_iter"] = 10
dataloader = {"train": LazyCall(build_nlp_train_loader)(dataset=LazyCall(Numbers)(), num_workers=1)}
