"""A data pipeline for OneFlow: a dataset in, global tensors out.

The names below are loaded at first use. So `import libai_data` is quick, and imports neither OneFlow nor modules that
a process that only reads data does not need.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable

from libai_data.launch.cuda_libraries import install_import_hook

if TYPE_CHECKING:
    from libai_data.config import LazyCall as LazyCall
    from libai_data.config import LazyConfig as LazyConfig
    from libai_data.config import default_argument_parser as default_argument_parser
    from libai_data.config import instantiate as instantiate
    from libai_data.data.samplers import CyclicSampler as CyclicSampler
    from libai_data.data.samplers import SingleRoundSampler as SingleRoundSampler
    from libai_data.delivery import to_global as to_global
    from libai_data.delivery.build import build_image_test_loader as build_image_test_loader
    from libai_data.delivery.build import build_image_train_loader as build_image_train_loader
    from libai_data.delivery.build import build_nlp_test_loader as build_nlp_test_loader
    from libai_data.delivery.build import build_nlp_train_loader as build_nlp_train_loader
    from libai_data.delivery.build import build_nlp_train_val_test_loader as build_nlp_train_val_test_loader
    from libai_data.engine import DefaultTrainer as DefaultTrainer
    from libai_data.engine import EagerTrainer as EagerTrainer
    from libai_data.engine import GraphTrainer as GraphTrainer
    from libai_data.engine import HookBase as HookBase
    from libai_data.engine import TrainerBase as TrainerBase
    from libai_data.engine import default_setup as default_setup
    from libai_data.engine.datamodule import DataModule as DataModule
    from libai_data.engine.datamodule import DataStages as DataStages
    from libai_data.iterables import DataLoader as DataLoader
    from libai_data.iterables import from_iterable as from_iterable
    from libai_data.loader import get_worker_info as get_worker_info
    from libai_data.loader import trivial_batch_collator as trivial_batch_collator
    from libai_data.mesh import ParallelMesh as ParallelMesh
    from libai_data.mesh import get_data_parallel_rank as get_data_parallel_rank
    from libai_data.mesh import get_data_parallel_size as get_data_parallel_size
    from libai_data.mesh import get_layer_placement as get_layer_placement
    from libai_data.mesh import get_nd_sbp as get_nd_sbp
    from libai_data.mesh import init as init
    from libai_data.mesh import synchronize as synchronize
    from libai_data.structures import DistTensorData as DistTensorData
    from libai_data.structures import Instance as Instance

__version__ = "0.1.0"

_MODULES: dict[str, str] = {
    name: f"libai_data.{module}"
    for module, names in {
        "config": "LazyCall LazyConfig default_argument_parser instantiate",
        "data.samplers": "CyclicSampler SingleRoundSampler",
        "delivery": "to_global",
        "delivery.build": "build_image_test_loader build_image_train_loader "
        "build_nlp_test_loader build_nlp_train_loader build_nlp_train_val_test_loader",
        "engine": "DefaultTrainer EagerTrainer GraphTrainer HookBase TrainerBase default_setup",
        "engine.datamodule": "DataModule DataStages",
        "iterables": "DataLoader from_iterable",
        "loader": "get_worker_info trivial_batch_collator",
        "mesh": "ParallelMesh get_data_parallel_rank get_data_parallel_size get_layer_placement get_nd_sbp init "
        "synchronize",
        "structures": "DistTensorData Instance",
    }.items()
    for name in names.split()
}


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of a package whose names are loaded at first use (PEP 562), and its `__all__`.

    Args:
        package: name of the package. Type checkers see its imports `X as X` instead.
        modules: name -> the module that defines it.
    """
    namespace = vars(sys.modules[package])
    namespace.setdefault("__all__", [*modules])

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(importlib.import_module(modules[name]), name)
        return value

    return load, lambda: sorted({*namespace, *modules})


__getattr__, __dir__ = lazy_names(__name__, _MODULES)


def _liveness() -> Any:
    from libai_data.mesh.peers import liveness

    return liveness


install_import_hook(lambda: _liveness().joining(), lambda: _liveness().loading())
