"""A data pipeline for OneFlow: a dataset in, global tensors out.

The names below are loaded when they are first used, so that `import libai_data` is quick, and imports neither OneFlow
nor what a process that only reads data does not need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from libai_data.cuda_libraries import install_import_hook

if TYPE_CHECKING:
    from libai_data.build import (
        build_image_test_loader,
        build_image_train_loader,
        build_nlp_test_loader,
        build_nlp_train_loader,
        build_nlp_train_val_test_loader,
    )
    from libai_data.config import LazyCall, LazyConfig, default_argument_parser, instantiate
    from libai_data.data_stages import DataStages
    from libai_data.datamodule import DataModule
    from libai_data.engine import (
        DefaultTrainer,
        EagerTrainer,
        GraphTrainer,
        HookBase,
        TrainerBase,
        default_setup,
    )
    from libai_data.integrations import from_iterable
    from libai_data.loader import DataLoader, trivial_batch_collator
    from libai_data.mesh import (
        ParallelMesh,
        get_data_parallel_rank,
        get_data_parallel_size,
        get_layer_placement,
        get_nd_sbp,
        synchronize,
    )
    from libai_data.samplers import CyclicSampler, SingleRoundSampler
    from libai_data.structures import DistTensorData, Instance

__version__ = "0.1.0"

_MODULES: dict[str, str] = {
    "CyclicSampler": "libai_data.samplers",
    "DataLoader": "libai_data.loader",
    "DataModule": "libai_data.datamodule",
    "DataStages": "libai_data.data_stages",
    "DefaultTrainer": "libai_data.engine",
    "DistTensorData": "libai_data.structures",
    "EagerTrainer": "libai_data.engine",
    "GraphTrainer": "libai_data.engine",
    "HookBase": "libai_data.engine",
    "Instance": "libai_data.structures",
    "LazyCall": "libai_data.config",
    "LazyConfig": "libai_data.config",
    "ParallelMesh": "libai_data.mesh",
    "SingleRoundSampler": "libai_data.samplers",
    "TrainerBase": "libai_data.engine",
    "build_image_test_loader": "libai_data.build",
    "build_image_train_loader": "libai_data.build",
    "build_nlp_test_loader": "libai_data.build",
    "build_nlp_train_loader": "libai_data.build",
    "build_nlp_train_val_test_loader": "libai_data.build",
    "default_argument_parser": "libai_data.config",
    "default_setup": "libai_data.engine",
    "from_iterable": "libai_data.integrations",
    "get_data_parallel_rank": "libai_data.mesh",
    "get_data_parallel_size": "libai_data.mesh",
    "get_layer_placement": "libai_data.mesh",
    "get_nd_sbp": "libai_data.mesh",
    "instantiate": "libai_data.config",
    "synchronize": "libai_data.mesh",
    "trivial_batch_collator": "libai_data.loader",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'libai_data' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


install_import_hook()
