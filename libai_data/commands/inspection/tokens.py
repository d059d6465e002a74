"""Sequences of tokens as text, each token with what its masks say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from libai_data.commands.inspection.field_kinds import is_loss_mask, is_padding_mask

COUNTED, PADDING, PLAIN = "counted", "padding", "plain"


class Token(NamedTuple):
    """A token.

    Args:
        id: its number.
        text: what it stands for, or its number; "·" for a negative one, which is no token.
        kind: "counted" by the loss, where a loss mask does not count all; "padding", or "plain".
    """

    id: int
    text: str
    kind: str


def decoder_of(tokenizer: Any) -> Callable[[int], str] | None:
    """A function from a token's number to its text; None without a tokenizer that has one.

    Args:
        tokenizer: with `decode([id])`, `id_to_token(id)` or `convert_ids_to_tokens([id])`, as the usual ones have.
    """
    tries = []
    decode = getattr(tokenizer, "decode", None)
    if callable(decode):
        tries.append(lambda number: decode([number]))
    by_id = getattr(tokenizer, "id_to_token", None)
    if callable(by_id):
        tries.append(by_id)
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    if callable(convert):
        tries.append(lambda number: convert([number])[0])
    if not tries:
        return None

    def text_of(number: int) -> str:
        for attempt in tries:
            try:
                text = attempt(number)
            except (IndexError, KeyError, ValueError, TypeError, OverflowError):  # a number that it does not know
                continue
            # Special tokens are often decoded to nothing.
            if isinstance(text, str) and text:
                return text
        return f"⟨{number}⟩"

    return text_of


def tokens_of(
    ids: np.ndarray, sample: Mapping[str, np.ndarray], text_of: Callable[[int], str] | None, most: int
) -> tuple[Sequence[Token], int]:
    """The tokens of one field of a sample.

    Args:
        ids: int [length].
        sample: all fields of the sample, whose masks of the same length are used.
        text_of: from a number to text; None shows numbers.
        most: tokens to show.

    Returns:
        The first tokens, and how many more there are.
    """
    counted = _mask(sample, ids, is_loss_mask)
    # A mask that counts all tokens, or all that are there, tells nothing by colour.
    present = _mask(sample, ids, is_padding_mask)
    there = np.ones(len(ids), dtype=bool) if present is None else present
    tells = counted is not None and not np.array_equal(counted & there, there)
    tokens = []
    for place, number in enumerate(ids[:most].tolist()):
        kind = PADDING if not there[place] else COUNTED if tells and counted is not None and counted[place] else PLAIN
        # No token: places of labels that the loss leaves out. Tokenizers may count from the end, as lists do.
        text = "·" if number < 0 else str(number) if text_of is None else text_of(number)
        tokens.append(Token(number, text, kind))
    return tokens, max(0, len(ids) - most)


def _mask(
    sample: Mapping[str, np.ndarray], ids: np.ndarray, is_it: Callable[[str, np.ndarray], bool]
) -> np.ndarray | None:
    for name, value in sample.items():
        if is_it(name, value) and value.shape == ids.shape and value.dtype.kind in "biuf":
            return value != 0
    return None
