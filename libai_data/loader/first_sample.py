"""The sample that all ranks read first, to see whether they have the same data."""

from __future__ import annotations

from typing import Any

from libai_data.data.samplers.cyclic import CyclicSampler
from libai_data.data.samplers.single_round import SingleRoundSampler


def read_by_all(stream: Any, position: int) -> tuple[int, int] | None:
    """Epoch and index of the first sample of the global batch at a position, if every rank can be asked for that one.

    With lanes, a rank or node need not have the files of other ranks.
    """
    if not isinstance(stream, (CyclicSampler, SingleRoundSampler)) or stream.makes_outputs or stream.order.lanes > 1:
        return None
    batch = stream.serving((0,)).batch_at(position)
    return None if batch is None else (int(batch.epochs[0]), int(batch.indices[0]))
