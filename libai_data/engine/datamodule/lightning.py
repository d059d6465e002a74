"""The hooks of a LightningDataModule, on batches of torch tensors in the form in which its loaders make them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from libai_data.data.nesting import is_texts, put_together, taken_apart
from libai_data.iterables.items import ArgumentNames, as_leaf, named
from libai_data.mesh.global_tensor import as_flow_tensor
from libai_data.structures import DistTensorData, Instance

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def is_lightnings_own(module: str) -> bool:
    """Whether a module, by its name, is one of Lightning."""
    return module.split(".")[0] in ("pytorch_lightning", "lightning")


def is_lightning(datamodule: Any) -> bool:
    """Whether a data module is derived from Lightning's."""
    return any(is_lightnings_own(base.__module__) for base in type(datamodule).__mro__)


def overrides_hooks(datamodule: Any) -> bool:
    """Whether a LightningDataModule has a hook of its own."""
    return any(not is_lightnings_own(getattr(datamodule, name).__module__) for name in HOOKS)


def changed_by_hooks(datamodule: Any, batch: Instance, dataloader_idx: int, names: Sequence[str] | None) -> Instance:
    """Let the hooks of a LightningDataModule work on this rank's rows, in the order in which Lightning calls them.

    They get what its loader yields: a mapping, a tuple or list, or a bare tensor, of torch tensors in the memory of the
    host, which is the device that they are told. Of a mapping the type is not kept, it is a dict. Fields that the batch
    had before keep their layouts.
    """
    import torch

    made = datamodule.on_before_batch_transfer(_torch_form(batch), dataloader_idx)
    made = datamodule.transfer_batch_to_device(made, torch.device("cpu"), dataloader_idx)
    made = datamodule.on_after_batch_transfer(made, dataloader_idx)
    return _own_form(made, batch, None if names is None else ArgumentNames(names))


def _torch_form(batch: Instance) -> Any:
    fields = {
        name: _torch_form(value) if isinstance(value, Instance) else _torch_value(value)
        for name, value in batch.get_fields().items()
    }
    if batch._unnamed is None:
        return fields
    values = list(fields.values())
    return batch._unnamed(values) if issubclass(batch._unnamed, (tuple, list)) else values[0]


def _torch_value(value: Any) -> Any:
    import torch

    leaves: dict[str, Any] = {}
    skeleton = taken_apart({"": value}, leaves)
    tensors = {
        path: leaf if is_texts(leaf) else torch.from_numpy(np.require(as_leaf(_bare(leaf), path), requirements="W"))
        for path, leaf in leaves.items()
    }
    return put_together(skeleton[""], lambda leaf: tensors[leaf.path])


def _bare(leaf: Any) -> Any:
    return leaf.tensor if isinstance(leaf, DistTensorData) else leaf


def _own_form(made: Any, before: Instance, names: ArgumentNames | None) -> Instance:
    """What the hooks made, as a batch of OneFlow tensors, in the place of the one before."""
    layouts: dict[str, Any] = {}
    taken_apart(
        {name: value for name, value in before.get_fields().items() if not isinstance(value, Instance)}, layouts
    )
    batch = copy.copy(before)
    batch._fields = {}
    for name, value in named(made, names).items():
        old = before.get_fields().get(name)
        batch.set(name, _own_form(value, old, names) if isinstance(old, Instance) else _own_value(name, value, layouts))
    return batch


def _own_value(name: str, value: Any, layouts: Mapping[str, Any]) -> Any:
    leaves: dict[str, Any] = {}
    skeleton = taken_apart({name: value}, leaves)
    for path, leaf in leaves.items():
        if not is_texts(leaf):
            leaves[path] = as_flow_tensor(as_leaf(leaf, path))
            layout = layouts.get(path)
            if isinstance(layout, DistTensorData):
                leaves[path] = DistTensorData(leaves[path], layout.sbp_list, layout.placement_idx)
    return put_together(skeleton[name], lambda leaf: leaves[leaf.path])
