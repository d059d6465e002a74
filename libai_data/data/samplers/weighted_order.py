"""Orders of samples that are drawn by weights, for example if the classes of a dataset have unequal sizes.

Draws with replacement invert the cumulative weights. Draws without replacement sort exponential keys: P. Efraimidis and
P. Spirakis, "Weighted random sampling with a reservoir" (Information Processing Letters 97, 2006). The seed and the
place decide each draw. All operations are defined by IEEE 754 to the last bit, so all machines draw the same samples.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log, sqrt
from typing import Any

import numpy as np

from libai_data.data.attributes import attribute_of
from libai_data.data.cached_property import cached_property
from libai_data.data.datasets.blend import blend_of
from libai_data.data.datasets.combine import length_of
from libai_data.data.datasets.fingerprint import hash_of
from libai_data.data.datasets.stream_transform import remember
from libai_data.data.nesting import array_of
from libai_data.data.random.hashing import combine64, mix64_array
from libai_data.data.samplers.order import Order
from libai_data.errors import CheckpointError, ConfigError
from libai_data.errors.argument_rules import BATCH_SIZE, FLAG, check, or_none

_VERSION = 1
"""Increased whenever the same (weights, seed, epoch, place) would draw another sample; a checkpoint records it."""
_EPOCHS_KEPT = 2
"""Epochs of draws without replacement that are cached: a batch may have samples of two epochs."""
_RULES = {"num_samples": or_none(BATCH_SIZE), "replacement": FLAG}


@dataclass(frozen=True)
class WeightedOrder(Order):
    """Place -> (epoch, index), drawn by weights; an epoch is `epoch_size` draws.

    With replacement, an epoch may have a sample several times, and each time its random transforms must differ.
    Therefore `locate` returns the place of each draw as its epoch.

    Args:
        size: number of samples in the dataset.
        epoch_size: draws of an epoch.
        digest: digest of the weights, up to a common factor; a state stores it instead of the weights.
        replacement: whether an epoch may have a sample several times.
        weights: float64 [size], the largest is 1; None if only the digest is known.
    """

    digest: str = ""
    replacement: bool = True
    weights: np.ndarray | None = field(default=None, compare=False, repr=False)

    def _check_epoch_size(self) -> None:
        if not self.replacement:
            super()._check_epoch_size()

    @property
    def can_locate(self) -> bool:
        return self.weights is not None

    def _known(self) -> np.ndarray:
        if self.weights is None:
            raise CheckpointError(
                "the samples are drawn by weights, and the data state holds only a digest of them; build the loader "
                "with these weights to find samples (with a command: --config-file)"
            )
        return self.weights

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self._known())

    @cached_property
    def _sorted(self) -> OrderedDict[int, np.ndarray]:
        return OrderedDict()

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self.replacement:
            return super().locate(positions)
        places = np.asarray(positions, dtype=np.int64)
        draws = _uniform(combine64(_VERSION, self.seed), places) * self._ends[-1]
        return places, np.searchsorted(self._ends, draws, side="right").astype(np.int64)

    def _indices_at(self, epoch: int, offsets: np.ndarray) -> np.ndarray:
        indices: np.ndarray | None = self._sorted.get(epoch)
        if indices is None:
            # Only these have keys: the key of a very small weight may be infinite, too.
            drawable = np.flatnonzero(self._known())
            with np.errstate(all="ignore"):
                keys = _exponential(_uniform(combine64(_VERSION, self.seed, epoch), drawable))
                keys /= self._known()[drawable]
            indices = drawable[np.argsort(keys, kind="stable")[: self.epoch_size]]
            remember(self._sorted, epoch, indices, _EPOCHS_KEPT)
        return indices[offsets]

    def _places_in_epoch(self, epoch: int, index: int) -> Sequence[int]:
        places = epoch * self.epoch_size + np.arange(self.epoch_size)
        return places[self.locate(places)[1] == index].tolist()

    def uses_of(self, index: int, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        epochs, places = super().uses_of(index, first, end)
        return (places if self.replacement else epochs), places

    def in_words(self) -> str:
        how = "with" if self.replacement else "without"
        return f"{self.epoch_size} drawn by weights each epoch, {how} replacement, with seed {self.seed}"

    def to_json(self) -> dict[str, Any]:
        drawn = {"digest": self.digest, "replacement": self.replacement}
        return {**super().to_json(), "order_version": _VERSION, "weights": drawn}


def drawn_order(
    dataset: Any, seed: int, weights: Any, num_samples: int | None, replacement: bool
) -> WeightedOrder | None:
    """The order of a dataset whose samples are drawn by weights; None without weights. Arguments as `CyclicSampler`."""
    check(_RULES, num_samples=num_samples, replacement=replacement)
    if weights is None:
        for name, value, default in (("num_samples", num_samples, None), ("replacement", replacement, True)):
            if value is not default:
                raise ConfigError(
                    f"{name} is {value!r}, but there are no weights; it has an effect only with weights: set weights, "
                    "too"
                )
        return None
    samples = length_of(dataset)
    for what, is_such in (
        ("a blend, which has its own weights", blend_of(dataset) is not None),
        ("a stream", attribute_of(dataset, "is_stream_transform", False)),
    ):
        if is_such:
            raise ConfigError(
                f"weights are given for a {type(dataset).__name__}, {what}; give them for a dataset of single samples"
            )
    proportions = _proportions(weights, samples)
    drawable = int(np.count_nonzero(proportions))
    if not replacement and num_samples is None:
        raise ConfigError(
            "replacement is False, so num_samples is needed: an epoch of all samples would contain each of them once, "
            "whatever its weight"
        )
    if not replacement and num_samples is not None and num_samples > drawable:
        raise ConfigError(
            f"num_samples is {num_samples}, but only {drawable} of {samples} samples have a weight above 0; draw at "
            "most as many, or set replacement=True"
        )
    digest = hash_of(proportions.tobytes(), 8)
    return WeightedOrder(samples, seed, True, num_samples or samples, digest, replacement, proportions)


def _proportions(weights: Any, samples: int) -> np.ndarray:
    given = array_of(weights)
    if given.shape != (samples,) or given.dtype.kind not in "iuf":
        raise ConfigError(
            f"weights are {given.dtype} {list(given.shape)}; they must be {samples} numbers, one for each sample"
        )
    given = given.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
    if len(wrong):
        raise ConfigError(f"weights has {given[wrong[0]]} for sample {wrong[0]}; a weight is finite and at least 0")
    largest = given.max(initial=0)
    if largest == 0:
        raise ConfigError(f"all {samples} weights are 0; at least one must be above 0")
    with np.errstate(all="ignore"):  # A proportion may be too small for a float, and is 0 then.
        proportions: np.ndarray = given / largest
    return proportions


def _uniform(key: int, numbers: np.ndarray) -> np.ndarray:
    """A uniform draw in [0, 1) for each of these numbers: float64 [n]."""
    words = mix64_array(mix64_array(numbers.astype(np.uint64) + np.uint64(key)) ^ np.uint64(combine64(key)))
    return (words >> np.uint64(11)) * 2.0**-53


def _exponential(uniform: np.ndarray) -> np.ndarray:
    """-log(1 - uniform) up to 1e-15; the last bit of numpy's own log differs between processors."""
    mantissa, exponent = np.frexp(1 - uniform)
    low = mantissa < sqrt(0.5)
    mantissa, exponent = np.where(low, 2 * mantissa, mantissa), exponent - low
    ratio = (mantissa - 1) / (mantissa + 1)
    series = np.zeros_like(ratio)
    for power in range(21, 0, -2):
        series = series * (ratio * ratio) + 1 / power
    return np.asarray(-(exponent * log(2) + 2 * ratio * series))
