"""Blends: an endless stream that mixes several datasets in given proportions."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, repeat
from math import gcd, inf, lcm
from typing import Any, Callable

import numpy as np

from libai_data.data.attributes import attribute_of, inner_datasets
from libai_data.data.datasets.combine import ConcatDataset
from libai_data.data.datasets.shares import shares_of, split_evenly
from libai_data.data.items import array_in, as_leaf, leaves_of
from libai_data.errors import ConfigError, SchemaError
from libai_data.errors.argument_rules import MAPPING, REAL, check_types, list_of, or_none
from libai_data.structures import check_field_names

logger = logging.getLogger(__name__)

LONGEST_PERIOD = 1 << 16
"""The largest period of a blend, in samples: each proportion is a multiple of 1 / period."""

_MOST_WRAPPERS = 16

Phase = tuple[int, tuple[int, ...]]

_RULES = {
    **dict.fromkeys(("changes", "changes_at_steps"), or_none(MAPPING)),
    "max_epochs": or_none(list_of(object, "a number of more than 0 for each dataset, or None for any number")),
}


@dataclass(frozen=True)
class Blend:
    """The proportions in which a stream uses the samples of some datasets.

    Args:
        sizes: number of samples of each dataset.
        phases: (first place, samples of each dataset in one period), ascending from place 0: from this place of the
            stream on, each period has these numbers of samples. Equal phases that follow each other are joined.
        steps: (step, samples of each dataset in one period): further phases. Their first places are not known yet,
            because they depend on the sizes of the steps.
        limits: how many samples of each dataset the stream uses, None for any number; () if no dataset is limited.
        limited_from: the place from which on the limits apply; samples before this place count too.

    Raises:
        ConfigError: Phases do not ascend from 0, or use samples of an empty dataset.
    """

    sizes: tuple[int, ...]
    phases: tuple[Phase, ...]
    steps: tuple[Phase, ...] = ()
    limits: tuple[int | None, ...] = ()
    limited_from: int = 0

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.phases]
        if not starts or starts[0] != 0 or any(later <= start for start, later in zip(starts, starts[1:])):
            raise ConfigError(f"the weights of a blend change at places {starts}; these must ascend, and begin with 0")
        joined: list[Phase] = []
        for _, counts in (*self.phases, *self.steps):
            if len(counts) != len(self.sizes):
                raise ConfigError(f"a blend of {len(self.sizes)} datasets has {len(counts)} weights; give one for each")
            for number, (count, size) in enumerate(zip(counts, self.sizes)):
                if count and not size:
                    raise ConfigError(f"dataset {number} of a blend is empty, but has a weight; leave it out")
        for start, counts in self.phases:
            if not joined or joined[-1][1] != counts:
                joined.append((start, counts))
        if self.limits and len(self.limits) != len(self.sizes):
            raise ConfigError(
                f"max_epochs has {len(self.limits)} entries for the {len(self.sizes)} datasets of a blend; give one "
                "for each dataset, or None for any number of epochs"
            )
        object.__setattr__(self, "phases", tuple(joined))

    def at_steps(self, place_of: Callable[[int], int]) -> Blend:
        """This blend with the first places of all phases; `place_of` returns the place of a step's first sample."""
        phases = dict(self.phases)
        for step, counts in self.steps:
            # Steps before the start of the run all get place 0, so the last of them applies.
            phases[max(0, place_of(step))] = counts
        return Blend(self.sizes, tuple(sorted(phases.items())), (), self.limits, self.limited_from)

    def before(self, place: int) -> tuple[Phase, ...]:
        """The phases that begin before a place."""
        return self.phases[: bisect_left([start for start, _ in self.phases], place)]

    def continued(self, place: int, past: tuple[Phase, ...], other: Blend) -> Blend:
        """This blend up to a place, and another one of datasets of the same sizes from this place on; `past` are the
        phases of this blend that had an effect before the place."""
        now = other.before(place + 1)[-1][1]
        later = ((place, now), *other.phases[len(other.before(place + 1)) :])
        if self.limits == other.limits:
            return Blend(self.sizes, (*self.before(place), *later), (), self.limits, self.limited_from)
        return Blend(self.sizes, (*past, *later), (), other.limits, place)


class BlendedDataset(ConcatDataset):
    """Several datasets that an endless stream mixes in proportion to their weights.

    With `CyclicSampler`, the count of each dataset since the last change of weights always differs from its share by
    less than one sample. Each dataset has its own order and its own epochs. A single round, or any other sampler, uses
    every sample once.

    Args:
        datasets: at least one; all must have the same fields.
        weights: one number per dataset, none negative, not all 0; only their proportions matter. The weights are exact
            if all are multiples of one number that is at least 1 / 65,536 of their sum. Otherwise they are rounded to
            the nearest multiples.
        changes: position of the stream, at least 1 -> weights from this position on.
        changes_at_steps: step of the training -> weights from this step on, for any global batch sizes. Without a
            trainer, a step is a batch.
        max_epochs: for each dataset the largest number of its epochs, such as [None, 4, 1.5], for at least one sample;
            None is any number. When a dataset reaches its number, the others get its share, in proportion to their
            weights. The stream has no end, so at least one dataset with a weight must have None.

    Raises:
        ConfigError: Weights are malformed, or too few or too many; they change both at positions and at steps; or at
            some place every dataset with a weight has reached its `max_epochs`.
        SchemaError: Datasets have different fields; the message names the datasets and the fields.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Sequence[float],
        changes: Mapping[int, Sequence[float]] | None = None,
        changes_at_steps: Mapping[int, Sequence[float]] | None = None,
        max_epochs: Sequence[float | None] | None = None,
    ) -> None:
        check_types(BlendedDataset, locals(), _RULES)
        super().__init__(datasets)
        if changes and changes_at_steps:
            raise ConfigError("the weights of a blend change at positions and at steps; give only changes_at_steps")
        sizes = tuple(len(dataset) for dataset in self.datasets)
        self.blend = Blend(
            sizes,
            _phases({0: weights}, "position", 0) + _phases(changes or {}, "position", 1),
            _phases(changes_at_steps or {}, "step", 1),
            _limits(max_epochs, sizes),
        )
        check_same_fields(self.datasets)


def _phases(weights: Mapping[int, Sequence[float]], what: str, least: int) -> tuple[Phase, ...]:
    for start in weights:
        if not isinstance(start, (int, np.integer)) or isinstance(start, bool) or start < least:
            raise ConfigError(f"the weights of a blend change at {start!r}; give a {what}, an int of at least {least}")
    return tuple((int(start), proportions(weights[start])) for start in sorted(weights))


def _limits(max_epochs: Sequence[float | None] | None, sizes: tuple[int, ...]) -> tuple[int | None, ...]:
    if max_epochs is None or all(each is None for each in max_epochs):
        return ()
    for each in max_epochs:
        if each is not None and not (REAL.accepts(each) and 0 < each < inf):
            raise ConfigError(
                f"max_epochs is {list(max_epochs)}; {each!r} is not allowed: give a number above 0 for each dataset, "
                "or None for any number of epochs"
            )
    # A float counts as the decimal number that Python prints for it. `Blend` refuses another number of limits.
    limits = tuple(
        each if each is None else int(Fraction(repr(float(each))) * size)
        for each, size in zip(max_epochs, chain(sizes, repeat(1)))
    )
    for number, (limit, size) in enumerate(zip(limits, sizes)):
        if limit == 0 and size:
            raise ConfigError(
                f"max_epochs is {list(max_epochs)}, but {max_epochs[number]} epochs of the {size} samples of dataset "
                f"{number} are no sample; give a larger number, or leave the dataset out"
            )
    return limits


def proportions(weights: Sequence[float]) -> tuple[int, ...]:
    """Convert weights to integer numbers of samples in one period: the smallest integers in these proportions, if their
    sum is at most `LONGEST_PERIOD`. Otherwise the nearest integers with this sum (by largest remainders), each at least
    1 if its weight is not 0. Weights are as for `shares_of`."""
    shares = shares_of("the weights of a blend", weights)
    period = lcm(*(share.denominator for share in shares))
    if period <= LONGEST_PERIOD:
        return tuple(int(share * period) for share in shares)
    counts = _nearest_counts(shares)
    divisor = gcd(*counts)
    return tuple(count // divisor for count in counts)


def _nearest_counts(shares: Sequence[Fraction]) -> list[int]:
    """Integers with the sum `LONGEST_PERIOD`, nearest to these shares, and at least 1 if a share is not 0."""
    if len(shares) > LONGEST_PERIOD:
        raise ConfigError(
            f"a blend of {len(shares)} datasets has unequal weights; a blend with unequal weights can have at most "
            f"{LONGEST_PERIOD} datasets"
        )
    counts = split_evenly(LONGEST_PERIOD, shares)
    for number, share in enumerate(shares):
        if share and not counts[number]:
            counts[counts.index(max(counts))] -= 1
            counts[number] = 1
    return counts


def blend_of(dataset: Any) -> Blend | None:
    """The blend of a dataset that is one, or wraps one; an attribute `blend` of another class does not count."""
    blend = attribute_of(dataset, "blend")
    return blend if isinstance(blend, Blend) else None


def refuse_inner_blend(dataset: Any, depth: int = 0) -> None:
    """Raise a ConfigError if a part of a dataset is a blend, whose weights a stream of the dataset would ignore.

    The dataset may be of any class, such as torch's `Subset` or a wrapper of the user.
    """
    for part in inner_datasets(dataset) if depth < _MOST_WRAPPERS else ():
        # A `Map` or a stream transform has the blend of its dataset.
        if blend_of(part) is not None and blend_of(part) is not blend_of(dataset):
            raise ConfigError(
                f"a {type(part).__name__} is within a {type(dataset).__name__}, so a stream would ignore its weights; "
                "take parts of single datasets, and blend them last, in one BlendedDataset with the weights of all. To "
                "change samples of a blend, use Map"
            )
        refuse_inner_blend(part, depth + 1)


def check_same_fields(datasets: Sequence[Any]) -> None:
    """Raise a SchemaError if the datasets' first samples differ in fields, dtypes or numbers of dims."""
    first: tuple[str, dict[str, str]] | None = None
    for number, dataset in enumerate(datasets):
        if not len(dataset):
            continue
        try:
            sample = dataset[0]
        except Exception as error:
            # Only a warning: the loader's `on_error` decides what happens if a sample cannot be read.
            logger.warning("Fields of dataset %d of a blend are not compared: its sample 0 failed: %s", number, error)
            continue
        whose = f"dataset {number} of the blend ({type(dataset).__name__})"
        forms = _forms_of(sample)
        if first is None:
            first = whose, forms
            continue
        other, expected = first
        check_field_names(list(forms), list(expected), whose)
        for name, form in forms.items():
            if form != expected[name]:
                raise SchemaError(
                    f"field '{name}' of {whose} is {form}, but that of {other} is {expected[name]}; all datasets of a "
                    "blend must have the same fields"
                )


def _forms_of(sample: Any) -> dict[str, str]:
    """Dtype and number of dims of each tensor of a sample of any form, or the class of another value, by path."""
    forms = {}
    for path, leaf in leaves_of(sample).items():
        forms[path] = f"a {type(leaf).__name__}"
        with suppress(SchemaError):  # A text, or a value that the loader does not use.
            array = array_in(as_leaf(leaf, path))
            forms[path] = f"{array.dtype} with {array.ndim} dims"
    return forms
