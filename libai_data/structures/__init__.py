"""Samples and batches: an `Instance` maps field names to tensors, a `DistTensorData` is a tensor with its layout."""

from libai_data.structures.instance import (
    DEFAULT_SBP,
    DistTensorData,
    Fields,
    Instance,
    NamedBatch,
    batch_info,
    batch_of,
    check_field_names,
    fields_of,
    origin_of,
)
from libai_data.structures.origin import Agreement, BatchInfo, Origin, RowIndices, new_info, new_origin, new_rows

__all__ = [
    "DEFAULT_SBP",
    "Agreement",
    "BatchInfo",
    "DistTensorData",
    "Fields",
    "Instance",
    "NamedBatch",
    "Origin",
    "RowIndices",
    "batch_info",
    "batch_of",
    "check_field_names",
    "fields_of",
    "new_info",
    "new_origin",
    "new_rows",
    "origin_of",
]
