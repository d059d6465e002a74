"""LiBai 0.1.1 as it can be used here: with a NumPy that is newer than it is, and on the CPU.

Import this module before `libai`. Nothing of what is changed has to do with data.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow

import libai_data  # noqa: F401

# NumPy 1.24 removed the name; LiBai asks for it on import.
if not hasattr(np, "float"):
    np.float = float  # type: ignore[attr-defined]

from libai.data import data_utils
from libai.utils import distributed


def _to_local(tensor: Any, pure_local: bool = False, ranks: Any = None) -> Any:
    """`ttol`, which knows the placement "cuda" only."""
    if not tensor.is_global:
        return tensor
    placement = flow.placement("cpu", ranks) if ranks else tensor.placement
    if pure_local:
        return tensor.to_global(placement=placement).to_local()
    everywhere = distributed.get_nd_sbp([flow.sbp.broadcast, flow.sbp.broadcast])
    return tensor.to_global(sbp=everywhere, placement=placement).to_local()


distributed.ttol = _to_local
# The wheel brings the helper built, and no Makefile.
data_utils.compile_helper = lambda: None
