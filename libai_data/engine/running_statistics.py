"""The running statistics of normalization layers, which each data-parallel rank computes of its own rows."""

from __future__ import annotations

from typing import Any

from libai_data.mesh.current import get_data_parallel_size


def average_statistics(model: Any) -> None:
    """Replace each running mean and variance by the average over the ranks that have a copy. Collective.

    OneFlow 0.9 takes the copies for equal, as broadcast tensors are: a checkpoint would store those of one rank, and
    ranks would evaluate by different ones.
    """
    import oneflow as flow

    if get_data_parallel_size() == 1:
        return
    for module in model.modules():
        for name in ("running_mean", "running_var"):
            tensor = getattr(module, name, None)
            if tensor is None or not tensor.is_global or any(sbp != flow.sbp.broadcast for sbp in tensor.sbp):
                continue
            placement, axes = tensor.placement, len(tensor.sbp)
            with flow.no_grad():
                own = tensor.to_local()
                # If all copies are equal, their average is the same to the last bit.
                first = own.to_global(placement=placement, sbp=[flow.sbp.broadcast] * axes).to_local()
                rests = (own - first).to_global(placement=placement, sbp=[flow.sbp.partial_sum] * axes)
                rest = rests.to_global(sbp=[flow.sbp.broadcast] * axes).to_local()
                if own.numel():  # else the tensor is on another pipeline stage
                    own.copy_(first + rest / placement.ranks.size)
