"""Samplers: which samples make up which batch."""

from libai_data.samplers.cyclic import CyclicSampler
from libai_data.samplers.order import Order
from libai_data.samplers.sampler import IndexBatch, StreamSampler
from libai_data.samplers.single_round import SingleRoundSampler

__all__ = ["CyclicSampler", "IndexBatch", "Order", "SingleRoundSampler", "StreamSampler"]
