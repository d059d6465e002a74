"""From the arrays of a batch to its Instance."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from libai_data.data.nesting import Leaf, Skeleton, TupleFields, array_to_text, put_together
from libai_data.loader.schema import Layout
from libai_data.mesh.arrays import as_flow_tensors
from libai_data.structures import DistTensorData, Instance, NamedBatch, Origin, batch_of


def assemble(
    arrays: Mapping[str, np.ndarray],
    layouts: Mapping[str, Layout],
    skeleton: Skeleton | None,
    origin: Origin,
    as_numpy: bool = False,
) -> Instance:
    """Make a rank's batch: OneFlow tensors over the arrays' own memory, or with `as_numpy` the arrays as they are."""

    if skeleton is None:
        return batch_of(NamedBatch, _fields(arrays, layouts, origin.parts, as_numpy), origin)

    def value_of(leaf: Leaf) -> Any:
        own = {leaf.path: arrays[leaf.path]}
        if leaf.text is not None:
            return array_to_text(own[leaf.path], leaf.text)
        return _fields(own, layouts, origin.parts, as_numpy)[leaf.path]

    if isinstance(skeleton, TupleFields):
        instance = batch_of(Instance, dict(put_together(skeleton, value_of)), origin)
        instance._is_tuple = True
        return instance
    return batch_of(NamedBatch, dict(put_together(skeleton, value_of)), origin)


_new_field = partial(DistTensorData.__new__, DistTensorData)


def _fields(
    arrays: Mapping[str, np.ndarray], layouts: Mapping[str, Layout], parts: frozenset[str], as_numpy: bool
) -> dict[str, DistTensorData]:
    fields: dict[str, DistTensorData] = {}
    for name, tensor in zip(arrays, arrays.values() if as_numpy else as_flow_tensors(arrays)):
        # Without `__init__`, whose checks take four times as long: the values are known to be valid.
        fields[name] = field = _new_field()
        field.tensor, layout = tensor, layouts[name]
        field.sbp_list, field.placement_idx = [*layout.sbp_list], layout.placement_idx
    for name in parts and parts & fields.keys():
        # For code that makes single fields global, as LiBai does.
        fields[name]._is_part = True
    return fields
