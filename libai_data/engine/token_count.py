"""How many tokens a training has used: real tokens, without padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libai_data.engine.losses import number_on_rank0

_TOKEN_FIELDS = ("input_ids", "tokens", "token_ids", "encoder_input_ids")
# Nonzero for real tokens. The first two have the shape of the tokens; the last is a matrix for each sample, whose
# first row is that of the first token, which sees all.
_MASKS = ("attention_mask", "segment_ids", "encoder_attn_mask")


class TokenCounter:
    """Counts the tokens of a training.

    Where the model's inputs have a mask of real tokens, its sum counts; of `cu_seqlens`, the last bound. It is computed
    where the inputs lie, and read when somebody asks. Without a mask, all tokens of samples of equal length count. If a
    collator may pad and there is no mask, the number is not known.

    Args:
        loader: the train loader.
    """

    may_be_absent = True  # From checkpoints of earlier versions.

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._per_sample: int | None = None
        self._counted = 0
        self._new = 0
        self._unread: Any = None

    def add(self, inputs: Mapping[str, Any]) -> None:
        """Count the tokens of a micro-batch: the model's inputs by name, global tensors [samples, ...]."""
        count = _real_tokens(inputs)
        if count is not None:
            self._unread = count if self._unread is None else self._unread + count
        elif self._per_sample is None:
            self._per_sample = tokens_per_sample(self._loader, inputs)

    def take(self, samples: int, new_samples: int) -> tuple[int, int]:
        """Tokens of the whole training and those since the last call, on rank 0; 0 if they are not known. Collective.

        Args:
            samples: that the training has used so far.
            new_samples: those since the last call.
        """
        self._read()
        new, self._new = self._new, 0
        if self._counted:
            return self._counted, new
        return samples * (self._per_sample or 0), new_samples * (self._per_sample or 0)

    def state_dict(self) -> dict[str, Any]:
        """What was counted by masks. Collective."""
        self._read()
        return {"tokens": self._counted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count."""
        self._counted, self._new, self._unread = int(state["tokens"]), 0, None

    def _read(self) -> None:
        if self._unread is not None:
            count, self._unread = int(number_on_rank0(self._unread)), None
            self._counted += count
            self._new += count


def tokens_per_sample(loader: Any, inputs: Mapping[str, Any]) -> int:
    """Tokens of one sample, where all have equally many; 0 where it is not known.

    The dataset's attribute `tokens_per_sample`, or else the length of the model's input that is called like tokens.
    With a collator, lengths may change from batch to batch and from mesh to mesh.
    """
    declared = getattr(getattr(loader, "dataset", None), "tokens_per_sample", None)
    if isinstance(declared, int):
        return declared
    if getattr(loader, "collates", True):
        return 0
    shapes = [tuple(inputs[name].shape) for name in _TOKEN_FIELDS if name in inputs]
    return next((int(shape[1]) for shape in shapes if len(shape) == 2), 0)


def _real_tokens(inputs: Mapping[str, Any]) -> Any:
    """The number of real tokens, a tensor of no dims, or None if the inputs do not say."""
    import oneflow as flow

    shape = next((tuple(inputs[name].shape) for name in _TOKEN_FIELDS if name in inputs), ())
    if len(shape) != 2:
        return None
    for name in _MASKS:
        mask = inputs.get(name)
        if mask is not None and tuple(mask.shape) == shape:
            return _number_of_nonzero(mask)
        if mask is not None and name == "encoder_attn_mask" and tuple(mask.shape) == (*shape, shape[1]):
            return _number_of_nonzero(mask[:, 0, :])
    bounds = inputs.get("cu_seqlens")
    if bounds is not None and tuple(bounds.shape) == (shape[0], shape[1] + 1):
        # Bounds ascend; the last one is the number of tokens of a row.
        return flow.amax(bounds.to(flow.int64), dim=1).sum()
    return None


def _number_of_nonzero(mask: Any) -> Any:
    import oneflow as flow

    return mask.to(flow.bool).to(flow.int64).sum()
