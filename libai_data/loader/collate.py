"""Collators: from a list of samples to a batch."""

from __future__ import annotations

from typing import Any, Callable, List

from libai_data.errors import SchemaError
from libai_data.structures import Instance

Collator = Callable[[List[Any]], Any]


def trivial_batch_collator(batch: List[Instance]) -> Instance:
    """Stack Instances field by field along a new batch dim.

    The loader knows this collator and writes samples straight into their rows of the batch instead of calling it.

    Args:
        batch: the samples.

    Returns:
        One Instance whose fields have shape [len(batch), ...].

    Raises:
        SchemaError: An item is no Instance, or fields, shapes, dtypes or layouts differ.
    """
    for row, sample in enumerate(batch):
        if not isinstance(sample, Instance):
            raise SchemaError(
                f"sample {row} of the batch is a {type(sample).__name__}; trivial_batch_collator stacks Instances, "
                "so return Instance(field=DistTensorData(tensor), ...) from the dataset or pass another collate_fn"
            )
    return Instance.stack(batch)
