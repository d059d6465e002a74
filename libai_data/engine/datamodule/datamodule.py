"""`DataModule`: all code that prepares and loads data in one class, with the methods of LightningDataModule."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from typing import Any

from libai_data.delivery import to_global
from libai_data.errors import ConfigError, nearest
from libai_data.errors.argument_rules import TEXT, Rule, check

_NAMES = Rule(
    "a name, or several",
    lambda value: value is None or (isinstance(value, Collection) and all(isinstance(each, str) for each in value)),
)


class HyperParameters(dict[str, Any]):
    """A dict whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter '{name}'; there are {list(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class DataModule:
    """Base of data modules; override what you need.

    ::

        class Digits(DataModule):
            def __init__(self, folder: str, batch_size: int = 32) -> None:
                self.save_hyperparameters()

            def prepare_data(self): ...             # download; on one process of each node
            def setup(self, stage): ...             # open; on every rank, for "fit", "validate", "test" or "predict"
            def train_dataloader(self): ...         # any loader or iterable of batches

    Attributes:
        prepare_data_per_node: prepare on the first rank of each node, instead of only on rank 0.
        trainer: the trainer that uses it; None without one.
    """

    prepare_data_per_node: bool = True
    trainer: Any = None

    @property
    def hparams(self) -> HyperParameters:
        """The arguments that `save_hyperparameters` saved."""
        if "_hparams" not in self.__dict__:
            self._hparams = HyperParameters()
        return self._hparams

    def save_hyperparameters(self, *names: str, ignore: Collection[str] | None = None) -> None:
        """Save the arguments of `__init__` in `hparams`. Call it in `__init__`.

        Args:
            *names: the arguments to save; by default all.
            ignore: arguments not to save.

        Raises:
            ConfigError: `__init__` has no such argument.
        """
        called = inspect.getargvalues(sys._getframe(1))
        found = {name: called.locals[name] for name in called.args[1:]}
        found.update(called.locals[called.keywords] if called.keywords else {})
        check({"ignore": _NAMES}, ignore=ignore)
        for name in names:
            check({"names": TEXT}, names=name)
        left_out = {ignore} if isinstance(ignore, str) else set(ignore or ())
        for name in {*names, *left_out} - set(found):
            raise ConfigError(f"save_hyperparameters names '{name}', which is not an argument.{nearest(name, found)}")
        self.hparams.update(
            {name: value for name, value in found.items() if name not in left_out and (not names or name in names)}
        )

    def prepare_data(self) -> None:
        """Download, unpack, tokenize: anything that happens once. Do not set attributes here; other ranks lack them."""

    def setup(self, stage: str) -> None:
        """Open the data, on every rank.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """

    def teardown(self, stage: str) -> None:
        """Close what `setup` opened."""

    def train_dataloader(self) -> Any:
        """The loader of training batches."""
        raise NotImplementedError(f"{type(self).__name__} has no train_dataloader")

    def val_dataloader(self) -> Any:
        """The loader of validation batches, or a list of several; none by default."""
        return []

    def test_dataloader(self) -> Any:
        """The loader of test batches, or a list of several; none by default."""
        return []

    def predict_dataloader(self) -> Any:
        """The loader of batches to predict, or a list of several; none by default."""
        return []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch of this rank's local tensors; an Instance [rows of this rank, ...]."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: str, dataloader_idx: int) -> dict[str, Any]:
        """Make the model's arguments from a batch: by default global tensors with the fields' layouts. Collective.

        Args:
            batch: an Instance of local tensors.
            device: "cuda" or "cpu".
            dataloader_idx: number of the batch's loader, if there are several.
        """
        return to_global(batch, device_type=device)

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        """Change the model's arguments."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must store in addition to the loader's state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
