"""Corpora for the tests of GPT samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from libai_data.data.datasets.gpt import GPTDataset
from libai_data.data.sources import IndexedWriter

Documents = list[list[int]]


def corpora(max_documents: int = 8, max_tokens: int = 12) -> st.SearchStrategy[Documents]:
    """Documents whose tokens are all different, so that each can be known again; some are empty."""

    def numbered(lengths: Sequence[int]) -> Documents:
        ends = np.cumsum([0, *lengths])
        return [list(range(1 + start, 1 + stop)) for start, stop in zip(ends[:-1], ends[1:])]

    return st.lists(st.integers(0, max_tokens), max_size=max_documents).map(numbered)


def write(prefix: Path, documents: Documents, dtype: Any = np.uint16) -> Path:
    """Write each document, longer ones as two sequences."""
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document([document[:3], document[3:]] if len(document) > 3 else [document])
    return prefix


def sample_of(dataset: GPTDataset, index: int) -> dict[str, np.ndarray]:
    """A sample, as bare arrays."""
    return {name: field.tensor for name, field in dataset[index].get_fields().items()}


def samples(dataset: GPTDataset) -> list[dict[str, np.ndarray]]:
    """All samples, as bare arrays."""
    return [sample_of(dataset, index) for index in range(len(dataset))]
