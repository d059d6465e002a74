"""Samplers: which samples make up which batch."""

from libai_data.data.samplers.blend_order import BlendOrder
from libai_data.data.samplers.cursor import IndexBatch
from libai_data.data.samplers.cyclic import CyclicSampler
from libai_data.data.samplers.lane_order import LaneOrder
from libai_data.data.samplers.ledger import Ledger
from libai_data.data.samplers.order import Order
from libai_data.data.samplers.resuming import OVERRIDES
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.data.samplers.schedule import LeftOut, StepSchedule
from libai_data.data.samplers.single_round import SingleRoundSampler
from libai_data.data.samplers.stream_state import StreamState

__all__ = [
    "OVERRIDES",
    "BlendOrder",
    "CyclicSampler",
    "IndexBatch",
    "LaneOrder",
    "Ledger",
    "LeftOut",
    "Order",
    "SingleRoundSampler",
    "StepSchedule",
    "StreamSampler",
    "StreamState",
]
