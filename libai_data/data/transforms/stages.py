"""A transform, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from libai_data.data.transforms.pipeline import Compose


def transform_stages(transform: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Apply a transform, and tell what it makes after each of its stages.

    A `Compose`, and what is called so and has a list `transforms`, as the transforms of flowvision and torchvision do,
    is taken apart; any other transform is one stage.

    Args:
        transform: from a value to a value.
        value: what to transform.

    Yields:
        Name of the stage, and what it made.
    """
    if isinstance(transform, Compose):
        yield from transform.stages(value)
        return
    parts = getattr(transform, "transforms", None)
    # Others have such a list too, of which they apply some, or in another order.
    if type(transform).__name__ != "Compose" or not isinstance(parts, (list, tuple)):
        parts = [transform]
    for part in parts:
        value = part(value)
        yield getattr(part, "__name__", type(part).__name__), value
