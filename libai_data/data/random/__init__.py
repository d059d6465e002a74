"""Randomness that depends on nothing but the seed and the sample."""

from libai_data.data.random.sample_random import BatchRandom, map_generator, sample_generator, sample_generators

__all__ = ["BatchRandom", "map_generator", "sample_generator", "sample_generators"]
