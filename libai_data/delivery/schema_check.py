"""Compares the fields of the ranks' batches, before the ranks make global tensors of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Callable

from libai_data.errors import SchemaError, by_rank, nearest, numbers_in_words
from libai_data.mesh.current import broadcast_py_object, get_mesh
from libai_data.structures import DistTensorData

FieldSignature = tuple[str, str, tuple[int, ...], tuple[str, ...], int]
"""Name, dtype, local shape, sbp_list and placement_idx of a batch's field; for strings, only the name."""


def signature_of(batch: Mapping[str, Any]) -> list[FieldSignature]:
    """What must be equal on all ranks, field by field, in order."""
    return [
        (name, "strings", (), (), 0)
        if not isinstance(value, DistTensorData)
        else (
            name,
            str(value.tensor.dtype).replace("oneflow.", ""),
            tuple(value.shape),
            tuple(value.sbp_list),
            value.placement_idx,
        )
        for name, value in batch.items()
    ]


def raise_differences(signature: list[FieldSignature]) -> None:
    """Raise a SchemaError on every rank that says how the fields differ. Collective; call it on all ranks."""
    signatures = [broadcast_py_object(signature, src=rank) for rank in range(get_mesh().world_size)]
    raise SchemaError("the ranks' batches differ: " + "; ".join(_differences(signatures)))


def _differences(signatures: list[list[FieldSignature]]) -> list[str]:
    names: dict[str, list[int]] = {}
    for rank, signature in enumerate(signatures):
        for field in signature:
            names.setdefault(field[0], []).append(rank)
    ranks = set(range(len(signatures)))
    found = [
        f"field '{name}' is missing on rank {numbers_in_words(sorted(ranks - set(holders)))}"
        for name, holders in names.items()
        if len(holders) < len(ranks)
    ]
    if found:
        return found
    for name in names:
        forms = {
            rank: f"{field[1]} {list(field[2])}, {list(field[3])} on layer {field[4]}" if field[3] else field[1]
            for rank, signature in enumerate(signatures)
            for field in signature
            if field[0] == name
        }
        if len(set(forms.values())) > 1:
            found.append(f"field '{name}' is {by_rank(forms)}{_advice(signatures, name)}")
    return found or [
        "the fields have another order: "
        + ", ".join(f"rank {rank} has {[field[0] for field in signature]}" for rank, signature in enumerate(signatures))
    ]


def _advice(signatures: list[list[FieldSignature]], name: str) -> str:
    """Advice if readers padded to different lengths, because each knows only its own samples; otherwise ""."""
    fields = [field for signature in signatures for field in signature if field[0] == name]
    shapes = {field[2] for field in fields}
    differ_in_shape_alone = len({(field[1], field[3], field[4]) for field in fields}) == 1
    same_rows = len({(len(shape), shape[:1]) for shape in shapes}) == 1
    if not (differ_in_shape_alone and same_rows):
        return ""
    return (
        " (a collator that pads to the longest sample sees only the samples of its own process: pad to one length, as "
        "PadCollator does with fixed=True, or let rank 0 read for all with readers=rank0)"
    )


def check_forward_fields(forward: Callable[..., Any], field_names: Iterable[str]) -> None:
    """Raise an error if a batch's fields are not the arguments of `forward`.

    Args:
        forward: the model's forward method, bound.
        field_names: names of the batch's fields, or a mapping from them.

    Raises:
        SchemaError: `forward` has no argument for a field, or an argument is missing; the message names them.
    """
    names = [*field_names.keys()] if isinstance(field_names, Mapping) else [*field_names]
    parameters = [
        parameter
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    problems = [
        f"forward has no argument '{name}' (its arguments are {known}).{nearest(name, known)}"
        for name in names
        if name not in known and not takes_any
    ]
    problems += [
        f"forward needs '{parameter.name}', but the samples have only {names}.{nearest(parameter.name, names)}"
        for parameter in parameters
        if parameter.kind is not parameter.VAR_KEYWORD
        and parameter.default is parameter.empty
        and parameter.name not in names
    ]
    if problems and names and names[0] == "0":
        raise SchemaError(
            f"the samples are tuples of {len(names)} value(s) without names: name the values after the arguments of "
            f"forward, {known}, with fields=[...] of the loader"
        )
    if problems:
        raise SchemaError(" ".join(problems) + " Name the fields of the dataset's samples after forward's arguments.")
