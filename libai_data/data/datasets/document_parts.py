"""Splits for training, validation and test: documents are divided before they are repeated, so splits share none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from typing import Any, Optional

from libai_data.data.attributes import attribute_of, has_attribute, inner_datasets
from libai_data.data.datasets.mapped import Map
from libai_data.data.sources.indexed import IndexedSource
from libai_data.errors import ConfigError

logger = logging.getLogger(__name__)

_MUCH = 0.9
Parts = Optional[list[Optional[Any]]]


def split_documents(dataset: Any, proportions: Sequence[float]) -> Parts:
    """Datasets with the same arguments, each over a part of the documents; see `IndexedSource.split`. A ConfigError if
    the dataset contains another dataset that repeats documents.

    Returns:
        The parts; a part is None if its documents are too few for one sample. None instead of the list if the samples
        can be divided instead, because they are not made of documents, or no document is in two samples.
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
    """Log the share of a corpus's tokens that the samples use, and set `dataset.tokens_per_epoch`.

    `used` is the number of tokens in all samples; a token in two samples counts twice.
    """
    dataset.tokens_per_epoch = used
    total = len(dataset.source.tokens)
    level = logging.INFO if used >= _MUCH * total else logging.WARNING
    words = "%s of %s: an epoch of %d samples uses %.1f %% of the %d tokens."
    logger.log(level, words, type(dataset).__name__, dataset.source.prefix, len(dataset), 100 * used / total, total)


def _mapped(dataset: Map, part: Any) -> Map:
    """The same map of other samples. It is a copy, because the constructor of a subclass may have other arguments."""
    mapped = copy(dataset)
    mapped.dataset = part
    return mapped


def _part(dataset: Any, source: IndexedSource, share: float) -> Any:
    if not share or not len(source.tokens):
        return None
    part = copy(dataset)
    try:
        part.read_source(source, share)
    except ConfigError:
        # The arguments were checked with all documents, so the documents of this part are too few.
        return None
    return part


def refuse_repeated(dataset: Any) -> None:
    """Raise a ConfigError if a dataset may have the same document in several samples, so that splits would share it."""
    repeated = attribute_of(dataset, "repeated_by", "")
    if repeated:
        raise ConfigError(
            f"{type(dataset).__name__} has {repeated}, so a document may be in several samples, and the parts would "
            "share documents. Leave the argument out (a loader's stream repeats the samples by itself), or give the "
            "dataset itself to build_nlp_train_val_test_loader, which divides its documents"
        )
    for each in inner_datasets(dataset):
        refuse_repeated(each)
