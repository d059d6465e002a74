"""Stream transforms: what comes of a stream of samples, if that is not one sample of each.

A transform makes each of its *output* samples of some *units*, of which the samples that it is given yield different
*amounts*: a filter makes an output of one unit, and a sample yields one or none; a packer makes an output of as many
units as a sequence has tokens, and a sample yields its tokens. Outputs take the units as they come in the order of the
stream, whoever reads them. So the place at which an output begins, and how far into the sample there, tells all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Callable, Protocol, Union

import numpy as np

from libai_data.data.datasets.fingerprint import fingerprint_of, hash_of
from libai_data.errors import ConfigError
from libai_data.data.random.global_generators import GlobalDraws
from libai_data.data.random.sample_random import reading_inputs

Keep = Union[Callable[[Any], bool], Sequence[bool], np.ndarray]

_PLACE_BITS = 40
_MOST_UNITS = 1 << 22
_LOOKED_UP = 32
_LEFT_OUT = object()


class InputOrder(Protocol):
    """In which order a transform is given the samples."""

    @property
    def seed(self) -> int:
        """With epoch and index it decides what random transforms draw."""

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epochs and indices at these places."""


def start_of(place: Any, offset: Any) -> Any:
    """Where an output begins, as one number (or int64 array): a place of the order, and units into its sample."""
    return (offset << _PLACE_BITS) | place


def place_and_offset(start: Any) -> tuple[Any, Any]:
    """The place of the order and the units into its sample; the inverse of `start_of`."""
    return start & ((1 << _PLACE_BITS) - 1), start >> _PLACE_BITS


class StreamTransform:
    """Base of the transforms. Its index is where an output begins (`start_of`), its length that of the dataset.

    Args:
        dataset: whose samples are transformed; its random transforms draw from the seed of the sampler. What a
            `FilteredDataset` does not keep is passed over, too.
        units: of an output.
        cuts: whether a sample may go on in the next output.
        keep: which samples are not passed over: a function of the sample, or a bool for each.

    Raises:
        ConfigError: An argument is out of range.
    """

    is_stream_transform = True

    def __init__(self, dataset: Any, units: int, cuts: bool, keep: Keep | None) -> None:
        if not isinstance(units, (int, np.integer)) or isinstance(units, bool) or not 1 <= units <= _MOST_UNITS:
            raise ConfigError(f"the length of an output is {units!r}; it must be an int of 1 to {_MOST_UNITS}")
        keeps: tuple[Callable[[Any], bool], ...] = (keep,) if callable(keep) else ()
        kept = None if keep is None or callable(keep) else np.asarray(keep)
        if kept is not None and (kept.dtype != bool or kept.shape != (len(dataset),)):
            raise ConfigError(
                f"keep is {kept.dtype} {list(kept.shape)}; it must be a function of a sample, or {len(dataset)} bools, "
                "one for each"
            )
        if isinstance(dataset, FilteredDataset):
            keeps = (*dataset._keeps, *keeps)
            if dataset._kept is not None:
                kept = dataset._kept if kept is None else dataset._kept & kept
            dataset = dataset.dataset
        elif hasattr(dataset, "is_stream_transform"):
            raise ConfigError(
                f"{type(self).__name__} got a {type(dataset).__name__}, whose samples have no index of their own; pack "
                "or filter its OneRound, or filter before packing"
            )
        self.dataset: Any = dataset
        self.units = int(units)
        self.cuts = cuts
        self._keeps: tuple[Callable[[Any], bool], ...] = keeps
        self._kept: np.ndarray | None = kept
        self._order: InputOrder | None = None
        self._draws = GlobalDraws(type(dataset).__name__)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def blend(self) -> Any:
        """That of the dataset, if it is a blend."""
        return self.dataset.blend

    @property
    def reads_to_measure(self) -> bool:
        """Whether amounts are found by reading the samples."""
        return bool(self._keeps)

    def follow_order(self, order: InputOrder) -> None:
        """Take the samples in this order; a sampler says so before anything is read.

        Raises:
            ConfigError: Another sampler has said otherwise.
        """
        if self._order is not None and self._order != order:
            raise ConfigError(
                f"one {type(self).__name__} serves two samplers of different orders ({self._order} and {order}); make "
                "one for each"
            )
        self._order = order

    def amounts(self, epochs: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """The units that these samples yield.

        Args:
            epochs: int64 [n].
            indices: int64 [n].

        Returns:
            int64 [n], none negative.
        """
        kept = np.ones(len(indices), dtype=bool) if self._kept is None else self._kept[indices]
        found = np.zeros(len(indices), dtype=np.int64)
        if not self.reads_to_measure:
            found[kept] = self._known_amounts(indices[kept])
            return found
        for row in np.flatnonzero(kept).tolist():
            sample = self._read(int(epochs[row]), int(indices[row]))
            if sample is not _LEFT_OUT:
                found[row] = self._measured(sample)
        return found

    def _known_amounts(self, indices: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _measured(self, sample: Any) -> int:
        raise NotImplementedError

    def _read(self, epoch: int, index: int) -> Any:
        """A sample, or `_LEFT_OUT`; it draws the same whoever reads it."""
        if self._order is None:
            raise ConfigError(f"no sampler has said in which order this {type(self).__name__} takes the samples")
        key = self._order.seed, epoch, index

        def read() -> Any:
            with reading_inputs((key,)):
                sample = self.dataset[index]
                return sample if all(keep(sample) for keep in self._keeps) else _LEFT_OUT

        return self._draws.around(read, key)

    def inputs_from(self, place: int) -> Iterator[tuple[int, Any]]:
        """The samples that are kept, with their indices, from a place of the order on."""
        if self._order is None:
            raise ConfigError(f"no sampler has said in which order this {type(self).__name__} takes the samples")
        while True:
            epochs, indices = self._order.locate(place + np.arange(_LOOKED_UP))
            if not len(indices):
                return
            for epoch, index in zip(epochs.tolist(), indices.tolist()):
                if self._kept is not None and not self._kept[index]:
                    continue
                sample = self._read(epoch, index)
                if sample is not _LEFT_OUT:
                    yield index, sample
            place += _LOOKED_UP

    def __getitem__(self, start: int) -> Any:
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        """What is done to which dataset; of a function that keeps samples, its name."""
        own: dict[str, Any] = {"units": self.units, "cuts": self.cuts}
        names = [getattr(keep, "__qualname__", type(keep).__name__) for keep in self._keeps]
        if self._kept is not None:
            names.append(hash_of(self._kept.tobytes()))
        if names:
            own["keep"] = names[0] if len(names) == 1 else names
        return {**fingerprint_of(self.dataset), "samples": len(self.dataset), **own}


class FilteredDataset(StreamTransform):
    """The samples of a dataset that are kept, for `CyclicSampler`: its endless stream without the others.

    Args:
        dataset: the whole.
        keep: a function that tells from a sample whether it is kept, or a bool for each sample. A function costs a
            reading of every sample by whoever plans the stream; it must be pure.

    Raises:
        ConfigError: `keep` is neither.
    """

    def __init__(self, dataset: Any, keep: Keep) -> None:
        super().__init__(dataset, 1, False, keep)

    def _known_amounts(self, indices: np.ndarray) -> np.ndarray:
        return np.ones(len(indices), dtype=np.int64)

    def _measured(self, sample: Any) -> int:
        return 1

    def __getitem__(self, start: int) -> Any:
        return next(self.inputs_from(place_and_offset(start)[0]))[1]
