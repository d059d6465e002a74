"""One loader over several: each of its batches contains one batch of each loader."""

from __future__ import annotations

from collections import abc
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from libai_data.data.attributes import attribute_of
from libai_data.data.samplers.cursor import Cursor
from libai_data.errors import CheckpointError, ConfigError, PassError
from libai_data.errors.saved_state import Keys, check_state
from libai_data.loader.iteration import LOADER_CLOSED
from libai_data.structures import Instance, NamedBatch


class CombinedLoader:
    """Iterates endlessly over several loaders at once. When a loader ends, its next pass begins.

    A batch is an Instance with one field for each loader: this loader's batch, also an Instance. `to_global` returns
    {name of the loader: {field: global tensor}}.

    Args:
        loaders: name of an argument of `model.forward` -> loader.
        unnamed: `list` if the user gave a list of loaders, without names.
    """

    mixup_func: None = None

    def __init__(self, loaders: Mapping[str, Any], unnamed: type | None = None) -> None:
        for name, loader in loaders.items():
            if attribute_of(loader, "mixup_func") is not None:
                raise ConfigError(
                    f"loader '{name}' is one of several, and has a mixup_func; remove it, and mix in "
                    "on_after_batch_transfer"
                )
        self.loaders = dict(loaders)
        self._unnamed = unnamed
        self._taken: dict[str, Any] = {}
        """Parts of the next batch that were read. They are kept if reading the other parts is interrupted."""
        self._before: dict[str, tuple[Any, Cursor]] = {}
        """The stream of each loader, and its cursor before the newest part."""

    def __iter__(self) -> Iterator[Instance]:
        return _CombinedPass(self)

    def take(self, taken: dict[str, Any], passes: dict[str, Iterator[Any]]) -> Instance:
        """The next batch: one batch of each loader, from the loader's pass in `passes`; adds the parts to `taken`."""
        try:
            for name, loader in self.loaders.items():
                if name not in taken:
                    self._take_part(taken, name, passes[name])
                if name not in taken:
                    passes[name] = iter(loader)
                    self._take_part(taken, name, passes[name])
                if name not in taken:
                    raise ConfigError(f"loader '{name}' of several yields no batch")
        finally:
            if self._taken is not taken:
                self._put_back(taken.keys())
        batch = Instance() if self._unnamed is list else NamedBatch()
        for name in self.loaders:
            batch.set(name, taken[name])
        batch._unnamed, batch._is_tuple = self._unnamed, self._unnamed is list
        return batch

    def _put_back(self, taken: abc.Set[str]) -> None:
        """Read the parts of these loaders again. They were read for a batch that nobody gets."""
        for name in taken & self._before.keys():
            stream, before = self._before[name]
            stream.cursor = before

    def _take_part(self, taken: dict[str, Any], name: str, batches: Iterator[Any]) -> None:
        stream = getattr(batches, "stream", None)
        if stream is not None:
            self._before[name] = stream, stream.cursor
        # In one call, so that no Ctrl-C comes between the loader's move and the place that keeps the batch.
        taken.update(zip([name], batches))

    def state_dict(self) -> dict[str, Any]:
        """The state of each loader, before the parts of a batch whose other parts were not read."""
        return {"loaders": {name: self._state_of(name, loader) for name, loader in self.loaders.items()}}

    def _state_of(self, name: str, loader: Any) -> Any:
        if name not in self._taken or name not in self._before:
            return loader.state_dict()
        stream, before = self._before[name]
        now, stream.cursor = stream.cursor, before
        try:
            return loader.state_dict()
        finally:
            stream.cursor = now

    def load_state_dict(self, state: Mapping[str, Any], override: Collection[str] = ()) -> None:
        """Continue where `state`, of loaders of the same names, was saved; see `DataLoader.load_state_dict`."""
        check_state(state, Keys({}, others=True), "several loaders")
        saved = state.get("loaders")
        if not isinstance(saved, abc.Mapping) or set(saved) != set(self.loaders):
            known = sorted(saved) if isinstance(saved, abc.Mapping) else "one loader alone"
            raise CheckpointError(
                f"the data state is that of {known}, but the loaders are {sorted(self.loaders)}; return loaders with "
                "the saved names from train_dataloader"
            )
        self._taken = {}
        for name, loader in self.loaders.items():
            loader.load_state_dict(saved[name], override)

    def stats(self) -> dict[str, Any]:
        """Name of each loader -> its `stats`."""
        return {name: loader.stats() for name, loader in self.loaders.items()}

    def close(self) -> None:
        """Close each loader. The parts of a batch whose other parts were not read are read again later."""
        taken, self._taken = self._taken, {}
        self._put_back(taken.keys())
        for loader in self.loaders.values():
            loader.close()


class _CombinedPass:
    """The iterator of a `CombinedLoader`. It is not a generator, because an error ends a generator silently."""

    def __init__(self, loader: CombinedLoader) -> None:
        self._loader = loader
        self._passes = {name: iter(each) for name, each in loader.loaders.items()}

    def __iter__(self) -> _CombinedPass:
        return self

    def __next__(self) -> Instance:
        """The next batch; a PassError if another thread has closed the loader meanwhile."""
        loader, taken = self._loader, self._loader._taken
        batch = loader.take(taken, self._passes)
        if loader._taken is not taken:
            raise PassError(LOADER_CLOSED)
        # In one line and without a call, as in `Pass`: an interrupt comes before, or when the user has the batch.
        loader._taken = {}; return batch  # noqa: E702  # fmt: skip
