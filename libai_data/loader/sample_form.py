"""Converts samples of any form to fields of tensors, as a batch has them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from libai_data.data.items import as_leaf, contents_of, field_of, leaves_of_batch, named
from libai_data.data.nesting import TEXT, Skeleton, is_flat, is_texts, taken_apart
from libai_data.data.random.global_generators import HOW_TO_DRAW
from libai_data.loader.default_collate import default_collate
from libai_data.structures import Instance, fields_of

_FLAT = frozenset((np.ndarray, bool, int, float, np.int64, np.float32))


class SampleForm(NamedTuple):
    """A sample as fields of tensors, whatever form it came in."""

    fields: dict[str, Any]  # path -> value; the path of a field that is not nested is its name
    skeleton: Skeleton | None = None  # how a batch is nested (see `taken_apart`); None if all fields are tensors
    has_text: bool = False  # the sample contains strings, which only a collator can put into a batch
    checksum: int | None = None  # of the tensors, if the sample was read twice and was the same
    warning: str = ""  # message for the user, if the sample was read twice and differed


def form_of(sample: Any, names: Sequence[str] | None = None) -> SampleForm:
    """Split a sample into its fields.

    Args:
        sample: an Instance, mapping, named tuple or dataclass, nested or not; or values that `names` names.
        names: names of the fields of a sample without names, or the fields to select; see `named`.
    """
    fields, leaves = named(sample, names), {}  # type: ignore[var-annotated]
    skeleton = taken_apart(fields, leaves)
    if any(isinstance(value, TEXT) or is_texts(value) for value in leaves.values()):
        return SampleForm({}, leaves_of_batch(default_collate([fields]), {}), has_text=True)
    is_plain = is_flat(skeleton) and isinstance(sample, (Instance, dict)) and len(leaves) == len(fields_of(sample))
    if is_plain and names is None:
        return SampleForm(leaves)
    return SampleForm({path: as_leaf(value, path) for path, value in leaves.items()}, skeleton)


def flat_fields(sample: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """The fields of `form_of` in a tenth of its time, for a tuple or dict of arrays and numbers; {} for any other."""
    fields: dict[str, Any] = {}
    if type(sample) is tuple:
        names = [*map(str, range(len(sample)))] if names is None else names
        fields = dict(zip(names, sample)) if len(names) == len(sample) else {}
    elif type(sample) is dict and names is not None:
        fields = {name: sample.get(name) for name in names}
    return fields if _FLAT.issuperset(map(type, fields.values())) else {}


def compared(sample: Any, form: SampleForm, read: Callable[[], Any], dataset: str, index: int) -> SampleForm:
    """Read a sample again: its form gets a checksum if both are the same, or a warning; none if this fails."""
    try:
        before, tensors = contents_of(sample), contents_of(form.fields)
        again = contents_of(read())
    except Exception:  # Only the comparison is lost.
        return form
    changed = [*dict.fromkeys(field_of(path) for path in before if again.get(path) != before[path])]
    if not changed:
        return form._replace(checksum=zlib.crc32(repr(tensors).encode())) if tensors else form
    warning = (
        f"{dataset} returns a different {' and '.join(map(repr, changed[:3]))} each time that sample {index} is read. "
        "So batches depend on which worker reads them and how often, and a resumed run gets other batches. If the "
        f"dataset draws random numbers, {HOW_TO_DRAW}; if it counts or reads the clock, use the index instead"
    )
    return form._replace(warning=warning)
