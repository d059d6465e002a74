"""Samples of any form, as the fields of tensors that a batch has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from libai_data.data.items import as_leaf, leaves_of_batch, named
from libai_data.data.nesting import TEXT, Skeleton, is_flat, is_texts, taken_apart
from libai_data.loader.default_collate import default_collate
from libai_data.loader.failures import SkippedSample
from libai_data.structures import Instance, fields_of


class SampleForm(NamedTuple):
    """A sample as fields of tensors, whatever form it came in.

    Args:
        fields: path -> value; the path of a field that is not nested is its name.
        skeleton: how a batch is nested (see `taken_apart`); None if fields are tensors all.
        has_text: it holds strings, which only a collator can put into a batch.
        skipped: failing samples whose place it takes.
        checksum: of its tensors, if they are the same each time that it is read, and that was tried.
        warning: what to tell the user if they are not.
    """

    fields: dict[str, Any]
    skeleton: Skeleton | None = None
    has_text: bool = False
    skipped: Sequence[SkippedSample] = ()
    checksum: int | None = None
    warning: str = ""


def form_of(sample: Any, names: Sequence[str] | None = None) -> SampleForm:
    """Take a sample apart.

    Args:
        sample: an Instance, mapping, named tuple or dataclass, nested or not; or what `names` gives names to.
        names: see `named`.

    Raises:
        SchemaError: It has no names, or other ones.
    """
    fields, leaves = named(sample, names), {}  # type: ignore[var-annotated]
    skeleton = taken_apart(fields, leaves)
    if any(isinstance(value, TEXT) or is_texts(value) for value in leaves.values()):
        return SampleForm({}, leaves_of_batch(default_collate([fields]), {}), has_text=True)
    is_plain = is_flat(skeleton) and isinstance(sample, (Instance, dict)) and len(leaves) == len(fields_of(sample))
    if is_plain and names is None:
        return SampleForm(leaves)
    return SampleForm({path: as_leaf(value, path) for path, value in leaves.items()}, skeleton)
