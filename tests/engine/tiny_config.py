"""The tiny training, as a config file."""

from tests.engine.tiny import tiny_config

_cfg = tiny_config("output/tiny")
train, graph, model, optim, dataloader = (_cfg[name] for name in ("train", "graph", "model", "optim", "dataloader"))
