"""How many tokens a training has used: real tokens, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Optional

import numpy as np

from libai_data.data.attributes import attribute_of
from libai_data.data.datasets.blend_table import name_of
from libai_data.data.datasets.combine import ConcatDataset
from libai_data.data.datasets.packing import PackedDataset
from libai_data.data.datasets.stream_transform import StreamTransform
from libai_data.data.samplers.stream_state import StreamState
from libai_data.engine.data_state import stream_state_of
from libai_data.engine.losses import number_on_rank0
from libai_data.errors.argument_rules import Rule, whole
from libai_data.errors.saved_state import Keys, check_state
from libai_data.iterables.iterable_loader import indexed_dataset_of
from libai_data.mesh.current import broadcast_py_object, get_data_parallel_size, is_main_process, tensor_to_rank0
from libai_data.structures import BatchInfo

_TOKEN_FIELDS = ("input_ids", "tokens", "token_ids", "encoder_input_ids")
# Inputs that are nonzero for real tokens. The first two have the shape of the tokens. The last has a matrix for each
# sample; the row of the first token is first, and this token sees all tokens.
_MASKS = ("attention_mask", "segment_ids", "encoder_attn_mask")

_NONE = np.empty(0, np.int64)
Infos = Sequence[Optional[BatchInfo]]
_COUNTS = Rule(
    "a mapping from datasets to numbers of tokens",
    lambda value: isinstance(value, Mapping) and all(map(whole(0).accepts, value.values())),
)
_KEYS = Keys({"tokens": whole(0)}, {"sources": _COUNTS})


class TokenCounter:
    """Counts the tokens of a training.

    If the model's inputs have a mask of real tokens, the number is its sum; of `cu_seqlens`, the last bound. The sum is
    computed on the inputs' devices, and read when the number is needed. Without a mask, all tokens of samples of equal
    length count. If a collator may pad and there is no mask, the number is not known. Rows that fill up a batch do not
    count.

    Attributes:
        sources: on rank 0, the tokens of each dataset of a blend or concatenation.
    """

    may_be_absent = True  # Checkpoints of earlier versions do not have this state.

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._per_sample: int | None = None
        self._counted = 0
        self._new = 0
        self._unread: Any = None
        self._batches: list[tuple[Any, Infos]] = []  # whose rows are counted one by one
        self._counted_until: StreamState | None = None
        self.sources: dict[str, int] = {}
        self._is_combined: bool | None = None

    def add(self, inputs: Mapping[str, Any], infos: Infos = (None,)) -> None:
        """Count the tokens of a micro-batch: the model's inputs by name, global tensors [samples, ...].

        `infos` are those of the batches that each rank has joined along dim 0.
        """
        rows = _real_tokens(inputs)
        if rows is None:
            if self._per_sample is None:
                self._per_sample = tokens_per_sample(self._loader, inputs)
            if attribute_of(self._loader, "endless") is False:  # Its steps may have fewer samples.
                self._count(self._per_sample * sum(info.valid for info in infos if info is not None))
        elif not _is_padded(infos):
            count = rows.sum()
            self._unread = count if self._unread is None else self._unread + count
        state = stream_state_of(self._loader)
        is_of_sources = state is not None and state.start is None and self._has_sources()
        if is_of_sources or (rows is not None and _is_padded(infos)):
            self._batches.append((rows, infos))

    def _count(self, tokens: int) -> None:
        self._counted += tokens
        self._new += tokens

    def _has_sources(self) -> bool:
        """Whether the tokens of several datasets are counted separately. The first call is collective."""
        if self._is_combined is None:
            # A rank that does not read has no dataset.
            self._is_combined = bool(broadcast_py_object(bool(parts_of(indexed_dataset_of(self._loader)))))
        return self._is_combined

    def take(self, samples: int, new_samples: int) -> tuple[int, int]:
        """Tokens of the whole training, and since the last call, on rank 0; 0 if not known. Collective.

        The arguments are the samples of the whole training, and those since the last call.
        """
        self._read()
        new, self._new = self._new, 0
        if self._counted:
            return self._counted, new
        return samples * (self._per_sample or 0), new_samples * (self._per_sample or 0)

    def state_dict(self) -> dict[str, Any]:
        """The tokens that masks have counted, and those of each source. Collective."""
        self._read()
        return {"tokens": self._counted, "sources": dict(self.sources)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count from a state of `state_dict`."""
        check_state(state, _KEYS, "a training", "tokens", "the checkpoint")
        self._counted, self._new, self._unread = int(state["tokens"]), 0, None
        self.sources, self._counted_until, self._batches = dict(state.get("sources", {})), None, []

    def _read(self) -> None:
        if self._unread is not None:
            self._count(int(number_on_rank0(self._unread)))
            self._unread = None
        batches = [(None if rows is None else _in_stream_order(rows, infos), infos) for rows, infos in self._batches]
        self._batches = []
        self._count(sum(int(tokens.sum()) for tokens, infos in batches if tokens is not None and _is_padded(infos)))
        before, parts = self._counted_until, parts_of(indexed_dataset_of(self._loader))
        of_lanes = self._exchange_tokens(before, parts)
        self._counted_until = stream_state_of(self._loader)
        if before is None or self._counted_until is None or not is_main_process():
            return
        for sums in of_lanes:
            self._add_sources(parts, sums)
        if not of_lanes and parts and before.order.size == self._counted_until.order.size:
            self._add_sources(parts, _sums(parts, *self._tokens_since(before, self._counted_until, batches)))

    def _exchange_tokens(self, before: StreamState | None, parts: list[tuple[str, int]]) -> list[list[int]]:
        """For each lane the tokens of each dataset since a state, if each rank knows those of its own lanes only."""
        if not getattr(attribute_of(self._loader, "stream"), "follows_own_lanes", False):
            return []
        dataset, starts, own = self._loader.dataset, None if before is None else before.start, {}
        if isinstance(starts, tuple) and parts and isinstance(dataset, PackedDataset):
            for lane, end in self._loader.stream.own_starts.items():
                own[lane] = _sums(parts, *dataset.amounts_between(starts[lane], end))
        told = self._loader.exchange_starts(own)
        # A lane that several ranks have read counts once.
        return [*{lane: sums for of_rank in told.values() for lane, sums in of_rank.items()}.values()]

    def _tokens_since(
        self, before: StreamState, now: StreamState, batches: list[tuple[np.ndarray | None, Infos]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the samples between two states, and their tokens, int64 [n] each; empty if they are not known."""
        if before.start is not None and now.start is not None:
            dataset = self._loader.dataset
            if before.is_whole and now.is_whole and isinstance(dataset, PackedDataset):
                return dataset.amounts_between(before.start, now.start)
            return _NONE, _NONE
        infos = [info for _, joined in batches for info in joined if info is not None]
        positions = [np.arange(info.position, info.position + info.valid) for info in infos]
        places = [now.order.in_rows(now.left_out.places_of(each)[None])[0] for each in positions]
        _, indices = now.order.locate(np.concatenate([_NONE, *places]))
        tokens = np.concatenate([_NONE, *(rows for rows, _ in batches if rows is not None)])
        if not len(tokens):
            return indices, np.full(len(indices), self._per_sample or 0)
        return (indices, tokens) if len(tokens) == len(indices) else (_NONE, _NONE)

    def _add_sources(self, parts: list[tuple[str, int]], sums: list[int]) -> None:
        if any(sums) or self.sources:
            for (name, _), count in zip(parts, sums):
                self.sources[name] = self.sources.get(name, 0) + count


def _sums(parts: list[tuple[str, int]], indices: np.ndarray, tokens: np.ndarray) -> list[int]:
    """The tokens of each dataset, of samples with so many tokens."""
    numbers = np.searchsorted(np.cumsum([size for _, size in parts]), indices, side="right")
    sums: list[int] = np.bincount(numbers, tokens, len(parts)).astype(np.int64).tolist()
    return sums


def parts_of(dataset: Any) -> list[tuple[str, int]]:
    """Name and length of each dataset of a blend or concatenation; [] for any other dataset."""
    whole = dataset.dataset if isinstance(dataset, StreamTransform) else dataset
    if not isinstance(whole, ConcatDataset) or len(whole.datasets) < 2:
        return []
    names = [PurePath(name_of(part)).name for part in whole.datasets]
    return [
        (name if names.count(name) == 1 else f"{name}#{number}", len(part))
        for number, (name, part) in enumerate(zip(names, whole.datasets))
    ]


def _is_padded(infos: Infos) -> bool:
    return any(info is not None and info.valid < info.size for info in infos)


def _in_stream_order(rows: Any, infos: Infos) -> np.ndarray:
    """The numbers of the rows of joined batches, on rank 0, in the order of the stream, without padding. Collective."""
    local = tensor_to_rank0(rows, device="cpu", to_local=True)
    if not is_main_process():
        return _NONE
    # Each rank has its own rows of all these batches, batch after batch.
    by_rank = local.numpy().reshape(get_data_parallel_size(), len(infos), -1)
    by_batch = by_rank.transpose(1, 0, 2).reshape(len(infos), -1)
    return np.concatenate(
        [each[: info.valid] if info and len(each) == info.size else each for each, info in zip(by_batch, infos)]
    )


def tokens_per_sample(loader: Any, inputs: Mapping[str, Any]) -> int:
    """Tokens of one sample, if all samples have the same number; 0 if this is not known.

    This is the dataset's attribute `tokens_per_sample`, or else the length of the model's input of tokens, such as
    `input_ids`. With a collator it is not known: lengths may differ between batches, and between meshes.
    """
    declared = getattr(indexed_dataset_of(loader), "tokens_per_sample", None)
    if isinstance(declared, int):
        return declared
    if attribute_of(loader, "collates", True):
        return 0
    shapes = [tuple(inputs[name].shape) for name in _TOKEN_FIELDS if name in inputs]
    return next((int(shape[1]) for shape in shapes if len(shape) == 2), 0)


def _real_tokens(inputs: Mapping[str, Any]) -> Any:
    """The number of real tokens of each sample, a tensor [samples], or None if the inputs do not have it."""
    # If samples are pairs of answers, the tokens of both answers count.
    found = [_of_one_kind(inputs, prefix) for prefix in ("", "chosen_", "rejected_")]
    known = [counts for counts in found if counts is not None]
    return sum(known[1:], known[0]) if known else None


def _of_one_kind(inputs: Mapping[str, Any], prefix: str) -> Any:
    import oneflow as flow

    shape = next((tuple(inputs[prefix + name].shape) for name in _TOKEN_FIELDS if prefix + name in inputs), ())
    if len(shape) != 2:
        return None
    for name in _MASKS:
        mask = inputs.get(prefix + name)
        if mask is not None and tuple(mask.shape) == shape:
            return _number_of_nonzero(mask)
        if mask is not None and name == "encoder_attn_mask" and tuple(mask.shape) == (*shape, shape[1]):
            return _number_of_nonzero(mask[:, 0, :])
    bounds = inputs.get(prefix + "cu_seqlens")
    if bounds is not None and tuple(bounds.shape) == (shape[0], shape[1] + 1):
        # Bounds ascend; the last one is the number of tokens of a row.
        return flow.amax(bounds.to(flow.int64), dim=1)
    return None


def _number_of_nonzero(mask: Any) -> Any:
    import oneflow as flow

    return mask.to(flow.bool).to(flow.int64).sum(dim=1)
