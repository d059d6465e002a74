"""A loader of this package as LiBai's trainer uses one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from libai_data.data.samplers.resuming import RESTART_DATA
from libai_data.delivery.to_global import compare_with_other_ranks
from libai_data.errors import CheckpointError
from libai_data.integrations.libai.trainer import take_part
from libai_data.structures import Instance


class LiBaiLoader:
    """Makes a loader of this package fit for LiBai's trainer, and LiBai's trainer for it.

    The builders of this module return such loaders; a `build_train_loader` of your own wraps what it returns, such as a
    loader of `from_iterable`. Iterating begins with the first batch, since LiBai asks for an iterator before it has
    read the checkpoint. The ranks compare their batches here, since LiBai makes each field global by itself.

    Args:
        loader: `DataLoader`, `SharedLoader`, or what `from_iterable` returns. What it has, this has too.
    """

    def __init__(self, loader: Any) -> None:
        take_part()
        self._loader = loader
        self._restored = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Instance]:
        return _Pass(self)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was taken, as JSON."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], override: Collection[str] = ()) -> None:
        """Go on where `state` was saved; iterators that LiBai already has go on there too.

        Args:
            state: of a loader.
            override: what may differ on purpose; see `OVERRIDES` of the samplers.

        Raises:
            CheckpointError: The state belongs to another dataset or stream.
        """
        self._loader.load_state_dict(state, **({"override": override} if override else {}))
        self._restored += 1

    def go_to(self, consumed_samples: int) -> None:
        """Continue after so many samples, for a checkpoint that LiBai saved without a place in the data.

        Raises:
            CheckpointError: The loader's samples have no order that could be counted.
        """
        stream: Any = getattr(self._loader, "stream", None)
        if not hasattr(stream, "set_consumed_samples"):
            raise CheckpointError(
                f"the checkpoint holds no place in the data, and a {type(self._loader).__name__} that is no endless "
                f"stream of a dataset cannot continue after {consumed_samples} samples; to begin its data anew: "
                f"train.resume_override=[{RESTART_DATA}]"
            )
        stream.set_consumed_samples(consumed_samples)
        self._restored += 1


class _Pass:
    """One iteration, begun with its first batch and anew when the loader's place was changed."""

    def __init__(self, loader: LiBaiLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Instance] | None = None
        self._restored = loader._restored

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Instance:
        if self._batches is None or self._restored != self._loader._restored:
            self._batches = iter(self._loader._loader)
            self._restored = self._loader._restored
        batch = next(self._batches)
        compare_with_other_ranks(batch)
        return batch
