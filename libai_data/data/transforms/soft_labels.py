"""Labels as distributions over the classes, of which mixtures can be made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

import numpy as np

from libai_data.errors import ConfigError, SchemaError
from libai_data.structures import DistTensorData, Instance, as_array, fields_of

LABELS = "labels"


class SoftLabels:
    """A dataset whose field `labels`, the number of a class, becomes a float32 [num_classes] that sums to 1.

    Args:
        dataset: whose samples have integer `labels` of shape [].
        num_classes: how many classes there are.
        smoothing: of the weight, the part that is spread evenly over all classes. Source: C. Szegedy et al.,
            "Rethinking the Inception Architecture" (CVPR 2016), section 7.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(self, dataset: Any, num_classes: int, smoothing: float = 0.0) -> None:
        if num_classes < 1:
            raise ConfigError(f"num_classes is {num_classes}; it must be at least 1")
        if not 0 <= smoothing < 1:
            raise ConfigError(f"label_smoothing is {smoothing}; it must be at least 0 and below 1")
        self.dataset = dataset
        self.num_classes = num_classes
        self.smoothing = smoothing

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Instance:
        """The sample, with soft labels."""
        return self._softened(self.dataset[index])

    @property
    def __getitems__(self) -> Callable[[list[int]], list[Instance]]:
        """The dataset's, if it has one."""
        get_items = self.dataset.__getitems__
        return lambda indices: [self._softened(sample) for sample in get_items(indices)]

    @property
    def read_batch(self) -> Callable[[np.ndarray, Mapping[str, np.ndarray]], None]:
        """The dataset's, if it has one that reads whole samples."""
        read = self.dataset.read_batch

        def read_batch(indices: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
            numbers = np.empty(len(indices), np.int64)
            read(indices, {**out, LABELS: numbers})
            self._fill(out[LABELS], numbers)

        return read_batch

    def _softened(self, sample: Any) -> Instance:
        fields = dict(fields_of(sample))
        if LABELS not in fields:
            raise SchemaError(f"to mix images, samples need a field '{LABELS}'; they have {list(fields)}")
        value = fields[LABELS]
        labels = value if isinstance(value, DistTensorData) else DistTensorData(value)
        numbers = as_array(labels.tensor, LABELS)
        if numbers.shape != () or numbers.dtype.kind not in "iu":
            raise SchemaError(
                f"field '{LABELS}' is {numbers.dtype} {list(numbers.shape)}; to mix images, it must be the number of a "
                "class, an integer of shape []"
            )
        soft = np.empty((1, self.num_classes), np.float32)
        self._fill(soft, numbers.reshape(1))
        fields[LABELS] = DistTensorData(soft[0], labels.sbp_list, labels.placement_idx)
        return Instance(**fields)

    def _fill(self, rows: np.ndarray, numbers: np.ndarray) -> None:
        wrong = numbers[(numbers < 0) | (numbers >= self.num_classes)]
        if len(wrong):
            raise SchemaError(
                f"field '{LABELS}' is {wrong[0]}; with num_classes {self.num_classes} it can be 0 to "
                f"{self.num_classes - 1}"
            )
        rows[...] = self.smoothing / self.num_classes
        rows[np.arange(len(rows)), numbers] = 1 - self.smoothing + self.smoothing / self.num_classes
