"""What a training takes of each dataset of a blend: a table, and a warning where a small one is seen often."""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import Any, Callable

from libai_data.data.datasets.blend import Blend, BlendedDataset

logger = logging.getLogger(__name__)

# N. Muennighoff et al., "Scaling Data-Constrained Language Models" (2023): 4 epochs are nearly as good as new data.
_EPOCHS_WITHOUT_HARM = 4
_ROW = "  {:<40} {:>14} {:>18} {:>8} {:>8}"


def log_blend(dataset: Any, samples: int, position_of: Callable[[int], int]) -> None:
    """Log how often a training sees each dataset of a blend; of other datasets nothing.

    Args:
        dataset: of the training.
        samples: that the training takes.
        position_of: of the first sample of a step.
    """
    if not isinstance(dataset, BlendedDataset):
        return
    taken = samples_taken(dataset.blend.at_steps(position_of), samples)
    lines = [_ROW.format("dataset", "samples", "tokens", "share", "epochs")]
    often = []
    for part, size, count in zip(dataset.datasets, dataset.blend.sizes, taken):
        name, epochs = name_of(part), float(count / size) if size else 0.0
        tokens = getattr(part, "tokens_per_epoch", None)
        shown = "?" if tokens is None else f"{tokens:,}"
        lines.append(_ROW.format(name, f"{size:,}", shown, f"{float(100 * count / samples):.1f} %", f"{epochs:.2f}"))
        if epochs > _EPOCHS_WITHOUT_HARM:
            often.append(f"{name} {epochs:.1f} times")
    logger.info("The training takes of the blend:\n%s", "\n".join(lines))
    if often:
        logger.warning(
            "The training sees %s; more than %d epochs of the same data teach little: lower the weight, or add data.",
            ", ".join(often),
            _EPOCHS_WITHOUT_HARM,
        )


def samples_taken(blend: Blend, samples: int) -> list[Fraction]:
    """How many samples of each dataset the stream has among its first ones, to less than one.

    Args:
        blend: with the places of all its phases.
        samples: of the stream.
    """
    taken = [Fraction(0)] * len(blend.sizes)
    ends = [*(start for start, _ in blend.phases[1:]), samples]
    for (start, counts), end in zip(blend.phases, ends):
        length = max(0, min(end, samples) - start)
        for number, count in enumerate(counts):
            taken[number] += Fraction(length * count, sum(counts))
    return taken


def name_of(dataset: Any) -> str:
    """The files of a dataset, or else its class."""
    source = getattr(dataset, "source", None)
    inner = getattr(dataset, "dataset", None)
    if source is not None and hasattr(source, "prefix"):
        return str(source.prefix)
    return name_of(inner) if inner is not None else type(dataset).__name__
