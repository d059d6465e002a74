"""Inside LiBai: LiBai's own `DefaultTrainer` trains on this package's loaders.

Two lines in a trainer::

    from libai_data.integrations.libai import DataPipeline

    class Trainer(DataPipeline, DefaultTrainer): ...

If the config names the builders of this module instead of LiBai's, no line is needed. In both cases LiBai's checkpoints
store the position in the data, LiBai's `--resume` continues there, and its evaluation counts each sample once.
"""

from libai_data.integrations.libai.builders import (
    DataPipeline,
    build_image_test_loader,
    build_image_train_loader,
    build_nlp_test_loader,
    build_nlp_train_loader,
    build_nlp_train_val_test_loader,
)
from libai_data.integrations.libai.loader import LiBaiLoader

__all__ = [
    "DataPipeline",
    "LiBaiLoader",
    "build_image_test_loader",
    "build_image_train_loader",
    "build_nlp_test_loader",
    "build_nlp_train_loader",
    "build_nlp_train_val_test_loader",
]
