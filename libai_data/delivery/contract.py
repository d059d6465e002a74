"""Compares the batches of all ranks with each other and with the layout, every few batches."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any, Callable

import numpy as np

from libai_data.data.samplers.walk import different_starts
from libai_data.delivery.gather import checksum_of, digest_of, gather_words
from libai_data.errors import ContractError, SchemaError, by_rank, nearest, numbers_in_words, ranks_by_value
from libai_data.mesh.current import broadcast_py_object, get_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.structures import DistTensorData, Origin, RowIndices

_STEP, _EPOCH, _POSITION, _SIZE, _VALID, _NEXT_START, _HAS_ROWS, _ORDER, _FIELDS, _SKIPPED, _COMMON_SAMPLE = range(11)
_ABSENT = -1
_NAMES = ("step", "epoch", "position", "global batch size", "number of valid rows", "place behind the batch")

FieldSignature = tuple[str, str, tuple[int, ...], tuple[str, ...], int]
"""Name, dtype, local shape, sbp_list and placement_idx of a batch's field; for strings, only the name."""


def check_contract(fields: Mapping[str, Any], origin: Origin) -> None:
    """Compare this batch between all ranks. Collective: each rank must call it for the same batch, on the main thread.

    All ranks must have the same fields and the same order, and be at the same step, epoch and position. Ranks that
    differ only in tensor or pipeline coordinate must have equal bytes of each field, and must have read equal samples.
    The samples that failed before must be equal, too. Ranks that differ in data coordinate must have read different
    samples, unless the loader allows repeats.

    Args:
        fields: this rank's local tensors; of lists of strings, only the names are compared.
        origin: origin of the batch. Bytes of its `parts` and `absent` fields are not compared.

    Raises:
        SchemaError: The fields differ; raised on every rank.
        ContractError: The batches differ; raised on every rank, with step, field or rows, and the ranks that differ.
    """
    mesh = get_mesh()
    heads = check_places(fields, origin)
    count = int(heads[0, _SIZE]) // mesh.data_parallel_size
    whole = {
        name: value for name, value in fields.items() if isinstance(value, DistTensorData) and name not in origin.parts
    }
    starts = _starts(origin)
    table = gather_words(np.concatenate([_checksums(whole, origin.absent), starts, _samples(origin.rows, count)]))
    checksums, starts, samples = np.split(table, np.cumsum([len(whole), len(starts)]), axis=1)
    problems = _different_bytes(checksums, list(whole), mesh)
    differs = different_starts(starts)
    repeats = origin.agreement is not None and origin.agreement.repeats
    problems += [differs] * bool(differs) + _samples_read_wrongly(heads, samples, mesh, repeats)
    _refuse(heads, problems + _skipped_differently(heads, mesh))


def check_places(fields: Mapping[str, Any], origin: Origin) -> np.ndarray:
    """Compare fields, shapes and position of this batch, not its contents. Collective, like `check_contract`.

    Returns the compared numbers of each rank, int64 [world size, words]; see `_head`.
    """
    signature = signature_of(fields)
    heads = gather_words(_head(signature, origin))
    # If batch sizes differ, shapes differ for this reason alone. `_different_places` reports the sizes.
    if len(set(heads[:, _FIELDS].tolist())) > 1 and len(set(heads[:, _SIZE].tolist())) == 1:
        raise_differences(signature)
    _refuse(heads, [*_different_orders(heads, _order(origin)), *_different_places(heads), *_different_data(heads)])
    return heads


def _refuse(heads: np.ndarray, problems: Sequence[str]) -> None:
    if problems:
        raise ContractError(f"the ranks do not get the same data at step {heads[0, _STEP]}: " + "; ".join(problems))


def _order(origin: Origin) -> str:
    return "" if origin.agreement is None else origin.agreement.order


def _head(signature: tuple[FieldSignature, ...], origin: Origin) -> np.ndarray:
    place = [0] * len(_NAMES) if origin.info is None else [_word(value) for value in origin.info]
    words = digest_of(_order(origin).encode()), digest_of_signature(signature)
    common_sample = (None if origin.agreement is None else origin.agreement.common_sample) or 3 * [_ABSENT]
    return np.array([*place, origin.rows is not None, *words, origin.skipped, *common_sample], dtype=np.int64)


def _word(value: Any) -> int:
    """A value of a `BatchInfo` as a number; 0 for starts of lanes, which are compared lane by lane."""
    return 0 if isinstance(value, tuple) else value or 0


def _starts(origin: Origin) -> np.ndarray:
    """Where the next output of each lane begins, as far as this rank knows."""
    start = None if origin.info is None else origin.info.next_start
    return np.array(start if isinstance(start, tuple) else (), dtype=np.int64)


def _checksums(fields: Mapping[str, DistTensorData], absent: AbstractSet[str]) -> np.ndarray:
    words = [_ABSENT if name in absent else checksum_of(value.tensor.numpy()) for name, value in fields.items()]
    return np.array(words, dtype=np.int64)


def _samples(rows: RowIndices | None, count: int) -> np.ndarray:
    """Epochs and indices of the rows, int64 [2 * count], so that the lengths are equal on all ranks."""
    words = np.full((2, count), -1, dtype=np.int64)
    if rows is not None:
        words[0], words[1] = rows.epochs, rows.indices
    return words.reshape(-1)


def _different_orders(heads: np.ndarray, order: str) -> list[str]:
    if len(set(heads[:, _ORDER].tolist())) == 1:
        return []
    orders = [broadcast_py_object(order, src=rank) for rank in range(len(heads))]
    return [f"the order of the samples differs: {by_rank(dict(enumerate(orders)))}"]


def _different_places(heads: np.ndarray) -> list[str]:
    found = [
        f"the {name} differs: {by_rank(dict(enumerate(map(str, heads[:, column].tolist()))))}"
        for column, name in enumerate(_NAMES)
        if len(set(heads[:, column].tolist())) > 1
    ]
    if len(set(heads[:, _SIZE].tolist())) > 1:
        found.append("lists of a batch_sampler of your own must be equally long on all ranks")
    return found


def _different_data(heads: np.ndarray) -> list[str]:
    """Compare the checksums of the sample that ranks read first; some ranks may have read none, or another one."""
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, (epoch, index, checksum) in enumerate(heads[:, _COMMON_SAMPLE:].tolist()):
        if checksum == _ABSENT:
            continue
        other, expected = seen.setdefault((epoch, index), (rank, checksum))
        if checksum != expected:
            return [
                f"sample {index} of epoch {epoch} has other values on rank {rank} than on rank {other}, so their "
                "datasets or seeds differ, or they use their loaders in another order; give each rank the whole "
                "dataset, which the loader divides among them (check_every=0 compares nothing)"
            ]
    return []


def _different_bytes(table: np.ndarray, names: list[str], mesh: ParallelMesh) -> list[str]:
    found = []
    for column, name in enumerate(names):
        for shard, ranks in ranks_by_shard(mesh).items():
            words = {rank: table[rank, column] for rank in ranks}
            odd = _first_difference({rank: word.tobytes() for rank, word in words.items() if word != _ABSENT})
            if odd:
                found.append(
                    f"field '{name}': rank {odd[0]} has other bytes than rank {odd[1]} (both of shard {shard})"
                )
    return found


def _samples_read_wrongly(heads: np.ndarray, samples: np.ndarray, mesh: ParallelMesh, repeats: bool) -> list[str]:
    found = []
    reader_of: dict[tuple[int, int], int] = {}
    valid_rows = int(heads[0, _VALID])
    for shard, ranks in ranks_by_shard(mesh).items():
        readers = [rank for rank in ranks if heads[rank, _HAS_ROWS]]
        odd = _first_difference({rank: samples[rank].tobytes() for rank in readers})
        if odd:
            found.append(f"rank {odd[0]} has read other samples than rank {odd[1]} (both of shard {shard})")
        if repeats or not readers:
            continue
        epochs, indices = samples[readers[0]].reshape(2, -1)
        padding = max(0, (shard + 1) * len(indices) - valid_rows) if valid_rows else 0
        for sample in list(zip(epochs.tolist(), indices.tolist()))[: max(0, len(indices) - padding)]:
            other = reader_of.setdefault(sample, readers[0])
            if other != readers[0]:
                found.append(
                    f"sample {sample[1]} of epoch {sample[0]} was read by rank {other} and by rank {readers[0]} (each "
                    "rank reads the lists of its own batch_sampler: give it a DistributedSampler, or pass the loader a "
                    "sampler and a batch_size instead; a batch_sampler of your own that repeats samples on purpose "
                    "needs check_every=0)"
                )
                break
    return found


def _skipped_differently(heads: np.ndarray, mesh: ParallelMesh) -> list[str]:
    """Compare which samples failed, in any batch so far, between the ranks that read the same samples."""
    found = []
    for shard, ranks in ranks_by_shard(mesh).items():
        odd = _first_difference({rank: heads[rank, _SKIPPED].tobytes() for rank in ranks if heads[rank, _HAS_ROWS]})
        if odd:
            found.append(
                f"since the loader was made, other samples failed and were replaced on rank {odd[0]} than on rank "
                f"{odd[1]} (both of shard {shard}), so their batches differed; see the warnings of both ranks, and let "
                "one rank read for both: readers='node'"
            )
    return found


def ranks_by_shard(mesh: ParallelMesh) -> dict[int, list[int]]:
    """The ranks at each coordinate of the data axis."""
    return ranks_by_value({rank: mesh.shard_of(rank) for rank in range(mesh.world_size)})


def _first_difference(values: dict[int, bytes]) -> tuple[int, ...]:
    """The first rank whose value differs from that of the first rank, and the first rank; () if all are equal."""
    ranks = list(values)
    return next(((rank, ranks[0]) for rank in ranks[1:] if values[rank] != values[ranks[0]]), ())


def signature_of(batch: Mapping[str, Any]) -> tuple[FieldSignature, ...]:
    """What must be equal on all ranks, field by field, in order."""
    return tuple(
        (name, _name_of(value.tensor.dtype), value.shape, tuple(value.sbp_list), value.placement_idx)
        if isinstance(value, DistTensorData)
        else (name, "strings", (), (), 0)
        for name, value in batch.items()
    )


@lru_cache(maxsize=64)
def _name_of(dtype: Any) -> str:
    """The name of a dtype; a tensor of OneFlow and an array of numpy have equal names."""
    return str(dtype).replace("oneflow.", "")


@lru_cache(maxsize=512)
def digest_of_signature(signature: tuple[FieldSignature, ...]) -> int:
    return digest_of(repr(signature).encode())


def raise_differences(signature: tuple[FieldSignature, ...]) -> None:
    """Raise a SchemaError on every rank that says how the fields differ. Collective; call it on all ranks."""
    signatures = [broadcast_py_object(signature, src=rank) for rank in range(get_mesh().world_size)]
    raise SchemaError("the ranks' batches differ: " + "; ".join(_differences(signatures)))


def _differences(signatures: list[tuple[FieldSignature, ...]]) -> list[str]:
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


def _advice(signatures: list[tuple[FieldSignature, ...]], name: str) -> str:
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
    parameters = list(inspect.signature(forward).parameters.values())
    unnamed = [each for each in parameters if each.kind is each.POSITIONAL_ONLY]
    if any(each.default is each.empty or each.name in names for each in unnamed):
        raise SchemaError(
            f"forward has positional-only arguments, {[each.name for each in unnamed]}, but a batch's fields are "
            "passed by name; remove '/' from the arguments of forward"
        )
    parameters = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY)]
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
