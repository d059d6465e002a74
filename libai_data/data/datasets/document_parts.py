"""Training, validation and test: documents are divided before they are repeated, so that no part sees another's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from typing import Any, Optional, Protocol, TypeVar

from libai_data.data.attributes import attribute_of, has_attribute
from libai_data.data.datasets.mapped import Map
from libai_data.data.sources.indexed import IndexedSource
from libai_data.errors import ConfigError

logger = logging.getLogger(__name__)

_MUCH = 0.9
Dataset = TypeVar("Dataset", bound="DocumentDataset")
Parts = Optional[list[Optional[Any]]]


class DocumentDataset(Protocol):
    """A dataset of samples that are made of a corpus's documents.

    Attributes:
        source: the corpus.
        repeated_by: the argument by which a document may be in several samples, such as "num_epochs=2", or "".
    """

    source: IndexedSource

    @property
    def repeated_by(self) -> str: ...

    def read_source(self, source: IndexedSource, share: float = 1.0) -> None:
        """Find the samples of a corpus, or of a share where their number is given, and forget those of another one.

        A ConfigError if the documents make no sample.
        """


def split_documents(dataset: Any, proportions: Sequence[float]) -> Parts:
    """Datasets of the same arguments, each over a part of the documents; see `IndexedSource.split`.

    Returns:
        The parts, None for one whose documents make no sample; or None if the samples are not made of documents, or
        each document is in one place only.

    Raises:
        ConfigError: The dataset holds another one that repeats documents.
    """
    if isinstance(dataset, Map):
        parts = split_documents(dataset.dataset, proportions)
        return parts and [part and _mapped(dataset, part) for part in parts]
    if has_attribute(dataset, "read_source"):
        total = sum(proportions)
        sources = dataset.source.split(proportions)
        return [_part(dataset, source, share / total) for source, share in zip(sources, proportions)]
    refuse_repeated(dataset)
    return None


def report_tokens(dataset: Any, used: int) -> None:
    """Log what share of a corpus's tokens the samples hold, and keep their number as `tokens_per_epoch`.

    `used` counts tokens as often as samples hold them.
    """
    dataset.tokens_per_epoch = used
    total = len(dataset.source.tokens)
    level = logging.INFO if used >= _MUCH * total else logging.WARNING
    words = "%s of %s: an epoch of %d samples uses %.1f %% of the %d tokens."
    logger.log(level, words, type(dataset).__name__, dataset.source.prefix, len(dataset), 100 * used / total, total)


def _mapped(dataset: Map, part: Any) -> Map:
    """The same on other samples; a subclass may take other arguments than its base does."""
    mapped = copy(dataset)
    mapped.dataset = part
    return mapped


def _part(dataset: Dataset, source: IndexedSource, share: float) -> Dataset | None:
    if not share or not len(source.tokens):
        return None
    part = copy(dataset)
    try:
        part.read_source(source, share)
    except ConfigError:
        # The arguments were checked with all documents: those of the part are too few.
        return None
    return part


def refuse_repeated(dataset: Any) -> None:
    """Refuse to cut up samples of which several may hold the same document."""
    repeated = attribute_of(dataset, "repeated_by", "")
    if repeated:
        raise ConfigError(
            f"{type(dataset).__name__} has {repeated}, by which a document may be in several samples; cut into parts, "
            "these would share documents. Leave the argument out (a loader's stream repeats the samples by itself), or "
            "give the dataset itself to build_nlp_train_val_test_loader, which divides its documents"
        )
    inner = attribute_of(dataset, "datasets")
    for each in [attribute_of(dataset, "dataset"), *(inner if isinstance(inner, (list, tuple)) else ())]:
        if each is not None:
            refuse_repeated(each)
