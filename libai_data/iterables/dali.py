"""DALI's pipelines, round after round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Arrays = tuple[np.ndarray, ...]


class PipelineRounds:
    """Iterates over the batches of a DALI pipeline, a round at a time: tuples of arrays [rows, ...].

    A pipeline with a reader runs on from one epoch into the next within a batch. Here the batch is cut there, and its
    other rows begin the next round. A pipeline whose external source ends is reset.

    Args:
        pipeline: a `nvidia.dali.Pipeline` whose outputs are on the CPU.
    """

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._left: list[Arrays] = []

    def __iter__(self) -> Iterator[Arrays]:
        self._pipeline.build()
        sizes = self._pipeline.epoch_size().values()
        left = max(sizes) if sizes else None
        while left is None or left > 0:
            arrays = self._left.pop() if self._left else self._run()
            if not arrays:
                self._pipeline.reset()
                return
            rows = len(arrays[0])
            if left is not None and rows > left:
                self._left.append(tuple(array[left:] for array in arrays))
                rows = left
            yield tuple(array[:rows] for array in arrays)
            left = None if left is None else left - rows

    def _run(self) -> Arrays:
        """The outputs of the next run, in memory of their own; none at the end."""
        try:
            outputs = self._pipeline.run()
        except StopIteration:
            return ()
        return tuple(np.array(output.as_array()) for output in outputs)
