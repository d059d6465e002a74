"""The stages of a data module: it is prepared once and set up for each stage; its loaders are sharded over the mesh."""

from __future__ import annotations

import copy
from collections import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from libai_data.data.attributes import call_if_there, has_attribute
from libai_data.data.items import ArgumentNames, array_in, as_leaf, laid_out_like, named
from libai_data.data.nesting import is_texts, taken_apart, with_leaves
from libai_data.delivery import to_global
from libai_data.delivery.gather import gather_words
from libai_data.delivery.read_plan import ReadPlan
from libai_data.delivery.shared_loader import SharedLoader
from libai_data.engine.built_parts import is_batch
from libai_data.errors import CheckpointError, ConfigError, PeerError, error_text, refusing_exit
from libai_data.errors.argument_rules import BATCH_SIZE, TEXT, check, check_methods, list_of, one_of, or_none
from libai_data.errors.saved_state import Keys, check_state
from libai_data.iterables.combined import CombinedLoader
from libai_data.iterables.from_iterable import from_iterable
from libai_data.iterables.iterable_loader import IterableLoader
from libai_data.iterables.plain_state import decoded, encoded
from libai_data.loader.batch_loader import BatchLoader
from libai_data.mesh.arrays import as_flow_tensor
from libai_data.mesh.current import get_mesh
from libai_data.structures import DistTensorData, Instance

STAGES = ("fit", "validate", "test", "predict")
_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_RULES = {
    **dict.fromkeys(("train_batch_size", "test_batch_size"), or_none(BATCH_SIZE)),
    "argument_names": or_none(list_of(str, "names")),
}
_OURS = (BatchLoader, SharedLoader, IterableLoader, CombinedLoader)


class DataStages:
    """Runs the stages of a data module, on all ranks; with a trainer or without.

    ::

        stages = DataStages(datamodule)
        stages.enter("fit")
        for batch in stages.loaders("train")[0]:
            loss = model(**stages.inputs(batch))
        stages.leave("fit")

    Args:
        datamodule: a `DataModule`, or anything with its methods, such as a LightningDataModule.
        train_batch_size: rows of a training batch for one data-parallel rank; if None, batches of other tools are
            global batches. Loaders of this package keep their own size.
        test_batch_size: the same for the other loaders.
        argument_names: the arguments of `model.forward`, in order, as names for the values of tuples.

    Raises:
        ConfigError: An argument is out of range, or `datamodule` is not a data module.
    """

    def __init__(
        self,
        datamodule: Any,
        train_batch_size: int | None = None,
        test_batch_size: int | None = None,
        argument_names: Sequence[str] | None = None,
    ) -> None:
        check(_RULES, **locals())
        methods = "prepare_data", "setup", "teardown", "train_dataloader"
        check_methods("datamodule", datamodule, "libai_data.DataModule", *methods)
        self.datamodule = datamodule
        self._sizes = {"train": train_batch_size}
        self._test_batch_size = test_batch_size
        self._names = None if argument_names is None else ArgumentNames(argument_names)
        self._is_prepared = False
        self._entered: set[str] = set()
        self._loaders: dict[str, list[Any]] = {}

    def enter(self, stage: str) -> None:
        """Prepare the data, once, and set them up for a stage. Collective.

        Args:
            stage: "fit", "validate", "test" or "predict".

        Raises:
            ConfigError: There is no such stage.
            PeerError: `prepare_data` failed on another rank.
        """
        check({"stage": one_of(*STAGES)}, stage=stage)
        if not self._is_prepared:
            self._prepare()
            self._is_prepared = True
        if stage not in self._entered:
            with refusing_exit(f"setup of {type(self.datamodule).__name__}"):
                self.datamodule.setup(stage=stage)
            self._entered.add(stage)

    def _prepare(self) -> None:
        mesh = get_mesh()
        per_node = getattr(self.datamodule, "prepare_data_per_node", True)
        preparing = ReadPlan(mesh, "node").leader_of(mesh.rank) if per_node else 0
        failure: Exception | None = None
        if preparing == mesh.rank:
            try:
                with refusing_exit(f"prepare_data of {type(self.datamodule).__name__}"):
                    self.datamodule.prepare_data()
            except Exception as error:
                failure = error
        # The other ranks wait here, without a time limit.
        failed = np.flatnonzero(gather_words(np.array([failure is not None], dtype=np.int64))[:, 0]).tolist()
        if failure is not None:
            raise failure
        if failed:
            raise PeerError(
                f"prepare_data of {type(self.datamodule).__name__} failed on rank(s) {failed}; see their output"
            )

    def leave(self, stage: str) -> None:
        """Close the loaders of the stage that no other stage uses, and call the module's `teardown`."""
        if stage not in self._entered:
            return
        self._entered.discard(stage)
        kinds = {"fit": ("train", "val"), "validate": () if "fit" in self._entered else ("val",)}
        for kind in kinds.get(stage, (stage,)):
            for loader in self._loaders.pop(kind, []):
                call_if_there(loader, "close")
        self.datamodule.teardown(stage=stage)

    def loaders(self, kind: str) -> list[Any]:
        """The loaders of a kind. The first call makes them.

        `from_iterable` wraps any loader that is not of this package: training batches repeat without end, other loaders
        are padded (marked) at the end. Several training loaders become one; see `CombinedLoader`.

        Args:
            kind: "train", "val", "test" or "predict".

        Raises:
            ConfigError: There is no training loader or no such kind, or more loaders in a list than model arguments.
        """
        check({"kind": one_of("train", "val", "test", "predict")}, kind=kind)
        if kind not in self._loaders:
            made = self._call_dataloader_method(f"{kind}_dataloader")
            several = list(made) if isinstance(made, (list, tuple)) else [made]
            # The training builders return None for validation and test loaders that they have not built.
            several = [loader for loader in several if loader is not None]
            batches = [each for each in several if isinstance(made, (list, tuple)) and is_batch(each)]
            if batches:
                raise ConfigError(
                    f"{kind}_dataloader of {type(self.datamodule).__name__} returned a {type(made).__name__} with a "
                    f"{type(batches[0]).__name__}, which is no loader; for a list of batches, return [batches]"
                )
            if kind == "train":
                self._loaders[kind] = [self._training_loader(made if isinstance(made, abc.Mapping) else several)]
            else:
                self._loaders[kind] = [self._wrapped(loader, kind) for loader in several]
        return self._loaders[kind]

    def _training_loader(self, loaders: Mapping[str, Any] | Sequence[Any]) -> Any:
        name, count = f"train_dataloader of {type(self.datamodule).__name__}", len(loaders)
        if not loaders:
            raise ConfigError(f"{name} returned no loader")
        if isinstance(loaders, abc.Mapping):
            return CombinedLoader({each: self._wrapped(loader, "train") for each, loader in loaders.items()})
        if count == 1:
            return self._wrapped(loaders[0], "train")
        names = self._names or ()
        if count > len(names):
            raise ConfigError(
                f"{name} returned a list of {count} loaders, but the model's forward has {len(names)} argument(s) "
                f"known by name: {list(names)}; return a dict, from each argument to the loader of what it is given, "
                "or one loader, over a blend of the datasets"
            )
        return CombinedLoader({each: self._wrapped(loader, "train") for each, loader in zip(names, loaders)}, list)

    def _call_dataloader_method(self, method: str) -> Any:
        """What a method of the module returns; None if the module has only Lightning's own method, which raises."""
        # Lightning's `from_datasets` sets the methods on the object.
        defined = vars(self.datamodule).get(method, getattr(type(self.datamodule), method, None))
        if defined is not None and not callable(defined):
            raise ConfigError(
                f"{method} of {type(self.datamodule).__name__} is a {type(defined).__name__}; it must be a method that "
                "returns the loaders"
            )
        if defined is None or (is_lightnings_own(defined.__module__) and defined.__module__.endswith(".hooks")):
            return None
        with refusing_exit(f"{method} of {type(self.datamodule).__name__}"):
            return getattr(self.datamodule, method)()

    def _wrapped(self, loader: Any, kind: str) -> Any:
        if isinstance(loader, _OURS):
            return loader
        size = self._sizes.get(kind, self._test_batch_size)
        ends = "cycle" if kind == "train" else "pad"
        # Each loader has its own ArgumentNames, because these store the type to which they were given (`given_to`).
        names = None if self._names is None else ArgumentNames(self._names)
        label = f"{kind}_dataloader of {type(self.datamodule).__name__}"
        if isinstance(loader, type):
            raise ConfigError(f"{label} returned the class {loader.__name__}; return an object of it")
        found = type(loader).__name__
        if has_attribute(loader, "__getitem__") and not has_attribute(loader, "__iter__"):
            raise ConfigError(
                f"{label} returned the dataset {found}; return a loader of it: DataLoader(dataset, batch_size=...), or "
                "batch_size=None if each item is a batch"
            )
        try:
            made: Any = from_iterable(loader, size, fields=names, batches=True, ends=ends)
        except ConfigError as error:
            raise ConfigError(f"{label} returned {found}, not a loader or a list of loaders: {error}") from error
        made.name_source(f"what {label} returned ({found})")
        return made

    def inputs(self, batch: Any, device: str = "cpu", dataloader_idx: int = 0) -> dict[str, Any]:
        """Make the model's arguments from a batch of loader number `dataloader_idx`, by the module's hooks. Collective.

        The hooks of a LightningDataModule get and return torch tensors, as its loaders yield them (`changed_by_hooks`).
        Global tensors are made from these afterwards.
        """
        if is_lightning(self.datamodule):
            if overrides_hooks(self.datamodule):
                batch = changed_by_hooks(self.datamodule, batch, dataloader_idx, self._names)
            return to_global(batch, device_type=device)
        changed: dict[str, Any] = _by_hooks(self.datamodule, batch, device, dataloader_idx)
        if not isinstance(changed, abc.Mapping) or isinstance(changed, Instance):
            raise ConfigError(
                f"the hooks of {type(self.datamodule).__name__} made a {type(changed).__name__} of a batch; "
                "transfer_batch_to_device and on_after_batch_transfer must return a dict of the model's arguments"
            )
        return changed

    def state_dict(self) -> dict[str, Any]:
        """The module's own state, as JSON."""
        return {"state": encoded(self.datamodule.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the module.

        Raises:
            CheckpointError: The state belongs to something else, or the module cannot load it.
        """
        check_state(state, Keys({"state": TEXT}), "a data module", "datamodule")
        own = decoded(state["state"])
        if own is None:
            return  # When the checkpoint was written, the module had no state.
        try:
            self.datamodule.load_state_dict(own)
        except Exception as error:
            raise CheckpointError(
                f"load_state_dict of {type(self.datamodule).__name__} raised {error_text(error)}, for the state "
                f"{own!r:.500}; let it accept what an earlier version saved, or start a new training"
            ) from error


def is_lightnings_own(module: str) -> bool:
    """Whether the Python module with this name belongs to Lightning."""
    return module.split(".")[0] in ("pytorch_lightning", "lightning")


def is_lightning(datamodule: Any) -> bool:
    """Whether a data module is derived from LightningDataModule."""
    return any(is_lightnings_own(base.__module__) for base in type(datamodule).__mro__)


def overrides_hooks(datamodule: Any) -> bool:
    """Whether a LightningDataModule has a hook of its own."""
    return any(not is_lightnings_own(getattr(datamodule, name).__module__) for name in _HOOKS)


def _by_hooks(datamodule: Any, batch: Any, device: Any, dataloader_idx: int) -> Any:
    """Call the hooks of a data module one after the other on a batch."""
    for hook in _HOOKS:
        arguments = (device, dataloader_idx) if hook == "transfer_batch_to_device" else (dataloader_idx,)
        batch = getattr(datamodule, hook)(batch, *arguments)
        if batch is None:
            raise ConfigError(
                f"{hook} of {type(datamodule).__name__} returned None; return the batch, changed or not (is a `return` "
                "missing?)"
            )
    return batch


def changed_by_hooks(datamodule: Any, batch: Instance, dataloader_idx: int, names: Sequence[str] | None) -> Instance:
    """Call the hooks of a LightningDataModule on this rank's rows, in the order in which Lightning calls them.

    The hooks get what the module's loader yields, as torch tensors in the memory of the host: a tuple or list, a bare
    tensor, or a dict for any mapping. Their argument `device` is the CPU. Fields that the batch had before keep their
    layouts.
    """
    import torch

    made = _by_hooks(datamodule, _torch_form(batch), torch.device("cpu"), dataloader_idx)
    return _own_form(made, batch, None if names is None else ArgumentNames(names))


def _torch_form(batch: Instance) -> Any:
    fields = {
        name: _torch_form(value) if isinstance(value, Instance) else with_leaves(name, value, _torch_leaf)
        for name, value in batch.get_fields().items()
    }
    if batch._unnamed is None:
        return fields
    values = list(fields.values())
    return batch._unnamed(values) if issubclass(batch._unnamed, (tuple, list)) else values[0]


def _torch_leaf(path: str, leaf: Any) -> Any:
    import torch

    if is_texts(leaf):
        return leaf
    return torch.from_numpy(np.require(as_leaf(array_in(leaf), path), requirements="W"))


def _own_form(made: Any, before: Instance, names: ArgumentNames | None) -> Instance:
    """The hooks' result as a batch of OneFlow tensors, with the layouts of the batch `before`."""
    olds = before.get_fields()
    layouts: dict[str, Any] = {}
    taken_apart({name: value for name, value in olds.items() if not isinstance(value, Instance)}, layouts)

    def own_leaf(path: str, leaf: Any) -> Any:
        if is_texts(leaf):
            return leaf
        tensor, old = as_flow_tensor(as_leaf(leaf, path)), layouts.get(path)
        return laid_out_like(tensor, old) if isinstance(old, DistTensorData) else tensor

    batch = copy.copy(before)
    batch._fields = {}
    for name, value in named(made, names).items():
        old = olds.get(name)
        own = _own_form(value, old, names) if isinstance(old, Instance) else with_leaves(name, value, own_leaf)
        batch.set(name, own)
    return batch
