"""LiBai's own trainer over a dataset of which a sample fails, on the rank that reads it: `fail_in_libai.py FOLDER`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from tests.integrations.libai_job import SAMPLES, LiBaiPoints, libai_config  # isort: skip

from libai.engine import DefaultTrainer, default_setup

from libai_data.integrations.libai import DataPipeline


class Broken(LiBaiPoints):
    """Its sample 11 cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 11:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


class Trainer(DataPipeline, DefaultTrainer):
    """What a user writes."""


cfg = libai_config(sys.argv[1], data=2, tensor=1)
cfg.dataloader.train.dataset = {"_target_": Broken, "length": SAMPLES}
default_setup(cfg, SimpleNamespace(resume=False))
Trainer(cfg).train()
