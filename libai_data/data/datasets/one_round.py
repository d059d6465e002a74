"""The outputs of a filter or packer over one epoch, as a dataset."""

from __future__ import annotations

import sys
from copy import copy
from typing import Any

import numpy as np

from libai_data.data.datasets.combine import check_index
from libai_data.data.datasets.stream_transform import StreamTransform, place_and_offset
from libai_data.data.random.hashing import combine64
from libai_data.data.samplers.order import Order
from libai_data.data.samplers.walk import Walk
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import check_types

_DRAWS_OF_INPUTS = 1


class OneRound:
    """The outputs of a filter or packer over one epoch, as a dataset with a length: to evaluate, or to shuffle packs.

    The constructor finds the outputs. Without `lengths`, or with a function `keep`, this reads every sample. The last
    output may be padded.

    Args:
        transform: the filter or packer; a copy of it is used.
        seed: seed of random transforms of the samples, which are the same in each round.

    Raises:
        ConfigError: `transform` is no filter or packer.
    """

    def __init__(self, transform: StreamTransform, seed: int = 0) -> None:
        if not isinstance(transform, StreamTransform):
            raise ConfigError(
                f"transform is a {type(transform).__name__}; it must be a stream transform, such as PackedDataset"
            )
        check_types(OneRound, locals())
        size, self._seed = len(transform), int(seed)
        self._transform = copy(transform)  # without what the transform has measured in another order
        self._transform._order = None
        self._starts = np.empty(0, np.int64)
        if size:
            # Another seed than `seed`, so that draws from the outputs differ from the draws of their samples.
            order = Order(size, combine64(self._seed, _DRAWS_OF_INPUTS), shuffle=False)
            self._starts, _ = Walk(self._transform, order, in_rounds=True).of_round(0, 0, sys.maxsize)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        check_index(index, len(self))
        return self._transform[int(self._starts[index])]

    @property
    def dataset(self) -> Any:
        """The dataset of the samples that the outputs are made of."""
        return self._transform.dataset

    def first_inputs(self, indices: np.ndarray) -> np.ndarray:
        """The index of the first sample of each of these outputs, int64 [n]."""
        return np.asarray(place_and_offset(self._starts[indices])[0])

    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint of the transform, with the number of outputs, and the seed if it is not 0."""
        seed = {"seed": self._seed} if self._seed else {}
        return {**self._transform.fingerprint(), "outputs": len(self), **seed}
