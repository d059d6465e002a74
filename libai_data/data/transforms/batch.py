"""Transforms of batches: applied by whoever reads, to rows of a global batch, and the same on every layout.

The rows of a global batch are read in parts, by several ranks and workers. So a transform sees some of them at a time,
as many as `rows_together` or a multiple, and what it makes of a row may depend on these alone, and on `BatchRandom`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from libai_data.data.random.sample_random import BatchRandom
from libai_data.errors import ConfigError


class BatchTransform:
    """Base of the transforms of batches; a loader accepts one as `batch_transform` (or as LiBai's `mixup_func`).

    `rows_together` consecutive rows of a global batch always come together, beginning at a multiple of it; the rows of
    each data-parallel rank must be a multiple of it.
    """

    rows_together = 1

    def prepared(self, dataset: Any) -> Any:
        """The dataset whose samples are put into batches; by default as it is. Fields may get another form here."""
        return dataset

    def __call__(self, fields: dict[str, np.ndarray], random: BatchRandom) -> None:
        """Transform rows, in place.

        Args:
            fields: of each field its array [n, ...], n a multiple of `rows_together`; of any part of a global batch.
            random: its generators.
        """
        raise NotImplementedError


def rows_together(transform: BatchTransform | None) -> int:
    """Rows that a transform needs together; 1 where there is none."""
    return 1 if transform is None else transform.rows_together


def check_rows_together(together: int, rows: int, whose: str) -> None:
    """Refuse numbers of rows that would part what a transform needs together.

    Args:
        together: rows that it needs together.
        rows: of one data-parallel rank.
        whose: where the rows are, for the message.

    Raises:
        ConfigError: With the numbers.
    """
    if rows % together:
        raise ConfigError(
            f"{whose} has {rows} rows on each data-parallel rank, but the batch transform needs multiples of "
            f"{together}; make the micro batch (train.train_micro_batch_size) a multiple of {together}"
        )
