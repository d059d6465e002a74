"""Datasets of other tools that give samples by their index, as datasets of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libai_data.data.nesting import is_flat, taken_apart
from libai_data.errors import ConfigError
from libai_data.iterables.collation import PieceCollator, default_collate
from libai_data.iterables.items import as_leaf, leaves_of_batch, named
from libai_data.iterables.iterable_source import Source
from libai_data.structures import Instance, fields_of


@dataclass(frozen=True)
class Opened:
    """A source that was opened on a rank that reads: its samples, or its stream.

    Args:
        dataset: gives samples by their index.
        collator: makes batches of them; None to stack them.
        skeleton: how batches are nested; None if all their fields are tensors.
        source: the stream.
    """

    dataset: Any = None
    collator: PieceCollator | None = None
    skeleton: Mapping[str, Any] | None = None
    source: Source | None = None


class NamedSamples:
    """A dataset whose samples are dicts of tensors, made of samples of another form.

    Args:
        dataset: `dataset[index]` returns a sample of any form that `named` knows.
        names: of the fields; see `named`.
    """

    def __init__(self, dataset: Any, names: Sequence[str] | None) -> None:
        self.dataset = dataset
        self.names = names

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.prepared(self.dataset[index])

    def prepared(self, sample: Any) -> Any:
        """The sample as a dict: path -> tensor."""
        leaves: dict[str, Any] = {}
        taken_apart(named(sample, self.names), leaves)
        return {path: as_leaf(value, path) for path, value in leaves.items()}


class RawSamples(NamedSamples):
    """A dataset whose samples stay as they are, for a collator."""

    def prepared(self, sample: Any) -> Any:
        """The sample."""
        return sample


class TogetherMixin:
    """Adds the reading of several samples at once, for datasets that can."""

    dataset: Any

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.prepared(sample) for sample in self.dataset.__getitems__(indices)]  # type: ignore[attr-defined]


class NamedSamplesTogether(TogetherMixin, NamedSamples):
    """`NamedSamples` of a dataset that has `__getitems__`."""


class RawSamplesTogether(TogetherMixin, RawSamples):
    """`RawSamples` of a dataset that has `__getitems__`."""


def open_samples(dataset: Any, names: Sequence[str] | None, collate_fn: Any) -> Opened:
    """Make a dataset of our own of any that gives samples by their index.

    Its first sample tells how samples are nested, and whether they hold strings, which only a collator can take.

    Args:
        dataset: has a length and `[index]`.
        names: of the fields; see `named`.
        collate_fn: of the user; None to stack.

    Raises:
        ConfigError: There is no sample.
        SchemaError: The first sample has no names, or holds what is no tensor.
    """
    if not len(dataset):
        raise ConfigError(f"{type(dataset).__name__} is empty; there is nothing to load")
    together = hasattr(dataset, "__getitems__")
    first, leaves = dataset[0], {}  # type: ignore[var-annotated]
    collator: PieceCollator | None = None
    if collate_fn is not None:
        collator = PieceCollator(names, collate_fn)
        collator([first])
        skeleton = collator.skeleton or {}
    else:
        skeleton = leaves_of_batch(default_collate([named(first, names)]), leaves)
        if any(isinstance(leaf, list) for leaf in leaves.values()):
            collator = PieceCollator(names)
    nested = None if is_flat(skeleton) else skeleton
    if collator is not None:
        return Opened((RawSamplesTogether if together else RawSamples)(dataset, names), collator, nested)
    # The builders would take a list for one of datasets.
    is_ours = isinstance(first, (Instance, dict)) and not isinstance(dataset, (list, tuple))
    if is_ours and set(leaves) == set(named(first)) == {str(name) for name in fields_of(first)}:
        return Opened(dataset)
    return Opened((NamedSamplesTogether if together else NamedSamples)(dataset, names), None, nested)
