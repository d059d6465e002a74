"""From a batch of local tensors to the keyword arguments of `model.forward`: global tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from libai_data.data.nesting import is_texts, put_together, taken_apart
from libai_data.delivery.contract import check_contract, check_places, digest_of_signature, signature_of
from libai_data.errors import ContractError, MeshError, SchemaError, nearest
from libai_data.mesh.current import get_mesh
from libai_data.mesh.global_tensor import local_to_global
from libai_data.mesh.peers.liveness import begin_collective, collectives_begun, note_batch
from libai_data.structures import DistTensorData, Fields, Instance, Origin, fields_of, origin_of


def to_global(batch: Fields, device_type: str | None = None) -> dict[str, Any]:
    """Make the global tensors of a batch. Collective: each rank must call it, with its own part, on the main thread.

    The ranks compare their fields at the first batch of a loader, and whenever they compare contents. They do so at
    each batch that a collator made, that a user's own sampler listed, or that comes from no loader. Ranks of one
    machine compare them at each batch, because a program may change a batch.

    Args:
        batch: fields [rows of this rank, ...]; bare tensors get the default layout. Fields may be nested (mappings,
            tuples, lists); lists of strings stay those of this rank. Each field may also be a batch.
        device_type: "cpu" or "cuda"; by default the mesh's.

    Returns:
        Field name -> global tensor [rows of all data-parallel ranks, ...], nested as the batch is. For a batch of
        tuples, a `GlobalTuple`, which unpacks into the tensors.

    Raises:
        SchemaError: The ranks' fields differ (on every rank), or a layout does not fit; the message names the field.
        ContractError: The ranks' batches differ in their place, number of rows or contents (on every rank). Or this
            rank uses another batch than a rank of its node (a rank has skipped a batch, or has taken one more), or a
            batch with other fields.
        MeshError: The loader was built for another mesh, the mesh has no layer with a field's placement_idx (the
            message names the field), or this is not the main thread.
        PeerError: Another rank has left the job, and does not use this batch.
    """
    if threading.current_thread() is not threading.main_thread():
        raise MeshError(
            f"to_global was called in the thread '{threading.current_thread().name}'; OneFlow makes global tensors on "
            "the main thread only. A thread may read batches ahead, and pass them on"
        )
    begin_collective()
    made = _all_fields(batch, device_type)
    return GlobalTuple(made) if isinstance(batch, Instance) and batch._is_tuple else made


class GlobalTuple(dict[str, Any]):
    """The global tensors of a batch of tuples, by name. It can also be read like a tuple: ``x, y = to_global(batch)``.

    Iterating over it gives the values; `keys` gives the names. As with a NamedTuple, names are attributes: ``batch.x``.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __getitem__(self, place: Any) -> Any:
        return super().__getitem__(place) if isinstance(place, str) else tuple(self)[place]

    def __getattr__(self, name: str) -> Any:
        if name not in self.keys():
            raise AttributeError(f"no field '{name}'; there are {[*self.keys()]}.{nearest(name, self.keys())}")
        return self[name]


def _all_fields(batch: Fields, device_type: str | None) -> dict[str, Any]:
    given = fields_of(batch)
    if all(type(value) is DistTensorData for value in given.values()):
        return _all_global(batch, given, device_type)
    if all(isinstance(value, Instance) for value in given.values()):
        return {name: to_global(value, device_type) for name, value in given.items()}
    leaves: dict[str, Any] = {}
    skeleton = taken_apart(given, leaves)
    _refuse_entries_of_samples(origin_of(batch), given)
    made = _all_global(batch, {name: _laid_out(name, value) for name, value in leaves.items()}, device_type)
    together: dict[str, Any] = put_together(skeleton, lambda leaf: made.get(leaf.path, leaves[leaf.path]))
    return together


def _refuse_entries_of_samples(origin: Origin, fields: Mapping[str, Any]) -> None:
    """Refuse a list with an entry for each sample in a loader's first batch, because entries of different samples would
    be joined: each tensor is joined with that of the same path on the other ranks.

    Raises:
        SchemaError: There are several data-parallel ranks, and a list has as many entries as this rank has samples,
            but its tensors have other numbers of rows.
    """
    ranks = get_mesh().data_parallel_size
    if ranks == 1 or origin.info is None or origin.agreement is None or origin.agreement.batches:
        return
    samples = origin.info.size // ranks
    for name, value in fields.items():
        if not isinstance(value, (list, tuple)) or len(value) != samples:
            continue
        leaves: dict[str, Any] = {}
        taken_apart({name: value}, leaves)
        for path, leaf in leaves.items():
            laid_out = _laid_out(path, leaf)
            shape = None if is_texts(laid_out) else list(laid_out.tensor.shape)
            if shape is not None and shape[:1] != [samples]:
                raise SchemaError(
                    f"field '{name}' has an entry for each of the {samples} samples of this rank, as '{path}' of shape "
                    f"{shape} shows. Ranks join tensors row by row, so entries of different samples would be joined; "
                    "return one tensor with a row for each sample, such as by collate_fn=PadCollator(...)"
                )


def _all_global(batch: Fields, fields: Mapping[str, Any], device_type: str | None) -> dict[str, Any]:
    _compare_with_other_ranks(batch, fields)
    parts = origin_of(batch).parts
    return {
        name: _global(name, value, device_type, name in parts)
        for name, value in fields.items()
        if isinstance(value, DistTensorData)
    }


def compare_with_other_ranks(batch: Instance) -> None:
    """Make only the comparison of `to_global`, for code that makes fields global one by one. Collective, main thread.

    Raises:
        SchemaError: The ranks' fields differ; raised on every rank, and names the field.
        ContractError: As for `to_global`.
    """
    begin_collective()
    leaves: dict[str, Any] = {}
    taken_apart(fields_of(batch), leaves)
    _compare_with_other_ranks(batch, {name: _laid_out(name, value) for name, value in leaves.items()})


def _compare_with_other_ranks(batch: Fields, fields: Mapping[str, Any]) -> None:
    origin = origin_of(batch)
    agreement = origin.agreement
    mesh = get_mesh()
    if agreement is not None and agreement.data_parallel_size not in (None, mesh.data_parallel_size):
        raise MeshError(
            f"the loader of this batch was built for {agreement.data_parallel_size} data-parallel rank(s), but the "
            f"mesh has {mesh.data_parallel_size}: call init (or set the mesh) before building loaders, and give "
            "samplers the mesh's data_parallel_rank and data_parallel_size"
        )
    if mesh.world_size > 1:
        if agreement is not None and agreement.check_every > 0 and agreement.batches % agreement.check_every == 0:
            check_contract(fields, origin)
        elif agreement is None or not agreement.fields_agree:  # They never agree for good if they may change.
            check_places(fields, Origin(origin.info))
    if agreement is not None:
        agreement.fields_agree = not agreement.per_batch
        agreement.batches += 1
        if mesh.world_size > 1 and agreement.check_every > 0 and origin.info is not None:
            step, epoch, position, size, valid, _ = origin.info
            agreement.first_use = agreement.first_use or collectives_begun()
            signature = signature_of(fields)
            place = (step, epoch or 0, position, size, valid, agreement.first_use, digest_of_signature(signature))
            try:
                note_batch(place)
            except ContractError as error:
                own = ", ".join(f"{name} {dtype} {list(shape)}" for name, dtype, shape, *_ in signature)
                raise ContractError(f"{error} (fields of this rank: {own})") from None


def _laid_out(name: str, value: Any) -> Any:
    """A leaf of a batch as a tensor with its layout, or its strings."""
    try:
        return value if isinstance(value, DistTensorData) or is_texts(value) else DistTensorData(value)
    except SchemaError as error:
        raise SchemaError(f"field '{name}': {error}") from error


def _global(name: str, value: DistTensorData, device_type: str | None, is_part: bool) -> Any:
    try:
        return local_to_global(value.tensor, value.sbp_list, value.placement_idx, device_type, is_part)
    except (SchemaError, MeshError) as error:
        raise type(error)(f"field '{name}': {error}") from error
