"""What a field is for, as far as its name, dtype and shape tell: pictures, tokens, masks, labels."""

from __future__ import annotations

import numpy as np

LABELS = ("labels", "label", "targets", "target", "lm_labels")

_NOT_TOKENS = ("mask", "position", "type", "segment", "length", "bool")
_CHANNELS = (1, 3, 4)
_LEAST_SIDE = 4


def is_mask(name: str, value: np.ndarray) -> bool:
    """Whether a field of a sample marks places: by its name, or by being boolean."""
    return value.ndim >= 1 and ("mask" in name.lower() or value.dtype == np.bool_)


def is_loss_mask(name: str, value: np.ndarray) -> bool:
    """Whether a field says which tokens the loss counts."""
    return is_mask(name, value) and value.ndim == 1 and "loss" in name.lower()


def is_padding_mask(name: str, value: np.ndarray) -> bool:
    """Whether a field says which tokens are there, and are not padding."""
    known = ("attention", "padding", "input", "pad")
    return is_mask(name, value) and value.ndim == 1 and any(word in name.lower() for word in known)


def is_tokens(name: str, value: np.ndarray) -> bool:
    """Whether a field holds the ids of tokens."""
    return value.ndim == 1 and value.dtype.kind in "iu" and not any(word in name.lower() for word in _NOT_TOKENS)


def is_class_label(name: str, value: np.ndarray) -> bool:
    """Whether a field is the number of a class."""
    return value.size == 1 and value.dtype.kind in "iu" and name.lower() in LABELS


def channels_at(shape: tuple) -> int | None:
    """The dim that holds the channels of a picture: 0 or 2 of three dims; -1 for a picture without; None for others."""
    if len(shape) == 2 and min(shape) >= _LEAST_SIDE:
        return -1
    if len(shape) == 3:
        for dim, sides in ((0, shape[1:]), (2, shape[:2])):
            if shape[dim] in _CHANNELS and min(sides) >= 1:
                return dim
    return None


def is_picture(value: np.ndarray) -> bool:
    """Whether a field can be shown as a picture."""
    return value.size > 0 and value.dtype.kind in "biuf" and channels_at(value.shape) is not None
