"""Logs how much of each dataset a training uses, as a table, and warns if it repeats a dataset too often."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from libai_data.data.attributes import attribute_of, has_attribute
from libai_data.data.datasets.blend import Blend, BlendedDataset
from libai_data.data.datasets.combine import ConcatDataset
from libai_data.data.datasets.mapped import Map
from libai_data.data.datasets.shares import shares_of, split_evenly
from libai_data.data.datasets.stream_transform import StreamTransform
from libai_data.data.samplers.blend_order import BlendOrder

logger = logging.getLogger(__name__)

# N. Muennighoff et al., "Scaling Data-Constrained Language Models" (2023): 4 epochs are nearly as good as new data.
_EPOCHS_WITHOUT_HARM = 4
_ROW = "  {:<40} {:>14} {:>18} {:>8} {:>8} {:>8} {:>8}"


def log_blend(dataset: Any, samples: int, position_of: Callable[[int], int]) -> None:
    """Log how often a training uses each dataset of a blend, or each corpus of tokens; other datasets are not logged.
    `samples` are those of the whole training; `position_of` returns the position of a step's first sample."""
    whole = dataset
    while isinstance(whole, (Map, StreamTransform)):
        whole = whole.dataset
    parts = whole.datasets if isinstance(whole, ConcatDataset) else [whole]
    is_blend = isinstance(whole, BlendedDataset)
    if not is_blend and all(tokens_of(part) is None for part in parts):
        return
    if attribute_of(dataset, "reads_to_measure", False):
        return
    blend = whole.blend.at_steps(position_of) if is_blend else _even_blend(parts)
    order = BlendOrder(len(whole), blend=blend)
    if isinstance(dataset, StreamTransform):
        samples = _places_of(dataset, order, samples)
    lines = [_ROW.format("dataset", "samples", "tokens", "weight", "share", "epochs", "most")]
    often = []
    weights, taken = blend.phases[0][1], order.taken_before(samples)
    limits = blend.limits or (None,) * len(parts)
    for part, size, weight, count, limit in zip(parts, blend.sizes, weights, taken, limits):
        name, tokens, per_sample = name_of(part), tokens_of(part), _passes_of(part) / max(size, 1)
        epochs = count * per_sample
        lines.append(
            _ROW.format(
                name,
                f"{size:,}",
                "?" if tokens is None else f"{tokens:,}",
                f"{100 * weight / sum(weights):.1f} %",
                f"{100 * count / max(samples, 1):.1f} %",
                f"{epochs:.2f}",
                "" if limit is None else f"{limit * per_sample:.2f}",
            )
        )
        if epochs > _EPOCHS_WITHOUT_HARM:
            often.append(f"{name} {epochs:.1f} times")
    logger.info("The datasets of the training:\n%s", "\n".join(lines))
    if often:
        logger.warning(
            "The training sees %s; more than %d epochs of the same data teach little: lower the weight, set max_epochs "
            "or add data.",
            ", ".join(often),
            _EPOCHS_WITHOUT_HARM,
        )


def _even_blend(parts: Sequence[Any]) -> Blend:
    """A blend that weights each dataset by its size, to a hundredth of a percent."""
    sizes = tuple(len(part) for part in parts)
    counts = split_evenly(10**4, shares_of("sizes", sizes))
    return Blend(sizes, ((0, tuple(counts)),))


def _places_of(transform: StreamTransform, order: BlendOrder, outputs: int) -> int:
    """About how many samples a transform needs for `outputs` outputs, by the mean amounts of its datasets."""
    everything = np.arange(len(transform))
    amounts = transform.amounts(np.zeros_like(everything), everything)
    ends = np.cumsum(order.blend.sizes)
    means = [part.mean() if len(part) else 0.0 for part in np.split(amounts, ends[:-1])]
    units = outputs * transform.units
    low, high = 0, 1
    while np.dot(order.taken_before(high), means) < units and high < 1 << 40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if np.dot(order.taken_before(middle), means) < units else (low, middle)
    return high


def tokens_of(dataset: Any) -> int | None:
    """Tokens of one epoch of a dataset; None if the dataset has no `tokens_per_epoch`."""
    return tokens_of(dataset.dataset) if isinstance(dataset, Map) else attribute_of(dataset, "tokens_per_epoch")


def _passes_of(dataset: Any) -> float:
    """How often one epoch of a dataset repeats its corpus, such as `num_epochs` times."""
    if isinstance(dataset, Map):
        return _passes_of(dataset.dataset)
    tokens = tokens_of(dataset)
    return 1.0 if tokens is None else max(1.0, tokens / len(dataset.source.tokens))


_WRAPPERS = ("libai_data.", "torch.utils.data.", "oneflow.utils.data.")


def name_of(dataset: Any) -> str:
    """The path of a dataset's files, or else its class; for a part or map of a dataset, the inner dataset's name."""
    source = attribute_of(dataset, "source")
    inner = getattr(dataset, "dataset", None) if type(dataset).__module__.startswith(_WRAPPERS) else None
    if source is not None and has_attribute(source, "prefix"):
        return str(source.prefix)
    return name_of(inner) if inner is not None else type(dataset).__name__
