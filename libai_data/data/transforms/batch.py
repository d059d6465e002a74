"""Transforms of batches: the reader applies them to rows of a global batch. The result is the same on every layout.

Several ranks and workers read the parts of a global batch. So a transform gets some rows at a time, a multiple of
`rows_together`. Its result for a row may depend only on these rows and on `BatchRandom`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from libai_data.data.random.sample_random import BatchRandom
from libai_data.errors import ConfigError

EVEN_LISTS = "let the batch_sampler, or the schedule of batch sizes, give each rank such a number of samples"
"""The remedy if batches have different sizes."""


class BatchTransform:
    """Base of the transforms of batches; a loader accepts one as `batch_transform` (or as LiBai's `mixup_func`).

    A transform always gets `rows_together` consecutive rows of a global batch together, beginning at a multiple of this
    number. The rows of each data-parallel rank must be a multiple of it.
    """

    rows_together = 1

    def prepared(self, dataset: Any) -> Any:
        """The dataset whose samples make the batches; by default `dataset`. Override it to change the form of
        fields.
        """
        return dataset

    def __call__(self, fields: dict[str, np.ndarray], random: BatchRandom) -> None:
        """Transform rows, in place.

        Args:
            fields: the array [n, ...] of each field, for any part of a global batch; n is a multiple of
                `rows_together`.
            random: makes the generators for the batch and for each row.
        """
        raise NotImplementedError


def rows_together(*transforms: Any) -> int:
    """Rows that the batch transforms among these need together; 1 without any."""
    return max([each.rows_together for each in transforms if isinstance(each, BatchTransform)], default=1)


def check_rows_together(together: int, rows: int, whose: str, remedy: str) -> None:
    """Raise an error if `rows` is no multiple of `together`; the message names the owner of the rows, `whose`."""
    if rows % together:
        raise ConfigError(
            f"{whose} has {rows} rows on each data-parallel rank, but the batch transform needs multiples of "
            f"{together}; {remedy}"
        )
