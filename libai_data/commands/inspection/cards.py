"""Cards: what is shown of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Callable

import numpy as np
from PIL import Image

from libai_data.commands.inspection.field_kinds import is_picture, is_tokens
from libai_data.commands.inspection.pictures import as_picture, range_of
from libai_data.commands.inspection.stages import Stage
from libai_data.commands.inspection.step_rows import RowOrigin, StepRows
from libai_data.commands.inspection.tokens import Token, tokens_of

_MOST_TOKENS = 160
_MOST_NUMBERS = 6


@dataclass
class Card:
    """One sample.

    Args:
        origin: where it comes from.
        pictures: (caption, picture).
        texts: (field, its tokens, how many more there are).
        numbers: (field, its numbers in words).
    """

    origin: RowOrigin
    pictures: list[tuple[str, Image.Image]] = field(default_factory=list)
    texts: list[tuple[str, Sequence[Token], int]] = field(default_factory=list)
    numbers: list[tuple[str, str]] = field(default_factory=list)

    @property
    def heading(self) -> str:
        """Where the sample comes from, in words."""
        origin = self.origin
        where = f"row {origin.row}, data rank {origin.shard}"
        return where if origin.index is None else f"{where}: sample {origin.index}, epoch {origin.epoch}"


def rows_to_show(rows: StepRows, count: int) -> list[int]:
    """Choose rows: the first ones of each data-parallel rank, equally many as far as there are."""
    of_shard: dict[int, list[int]] = {}
    for origin in rows.origins:
        of_shard.setdefault(origin.shard, []).append(origin.row)
    in_turn = [row for turn in zip_longest(*of_shard.values()) for row in turn if row is not None]
    return sorted(in_turn[:count])


def cards_of(
    rows: StepRows, shown: Sequence[int], stages: dict[int, list[Stage]], text_of: Callable[[int], str] | None
) -> list[Card]:
    """The cards of some rows.

    Args:
        rows: of a step.
        shown: the rows.
        stages: row -> its stages, for rows whose dataset tells them.
        text_of: from a token's number to its text.
    """
    cards = [Card(rows.origins[row]) for row in shown]
    shown_as_stage = _add_stages(cards, rows, stages)
    for name, values in rows.values.items():
        own = [values[row] for row in shown]
        if name in shown_as_stage:
            continue
        if all(is_picture(value) for value in own):
            scale = range_of(values)
            for card, value in zip(cards, own):
                _add_picture(card, name, value, scale)
        elif is_tokens(name, own[0]) and own[0].size > 1:
            for row, card, value in zip(shown, cards, own):
                sample = {other: each[row] for other, each in rows.values.items()}
                card.texts.append((name, *tokens_of(value, sample, text_of, _MOST_TOKENS)))
        else:
            for card, value in zip(cards, own):
                card.numbers.append((name, _in_words(value)))
    return cards


def _add_stages(cards: list[Card], rows: StepRows, stages: dict[int, list[Stage]]) -> list[str]:
    """Add pictures of the stages.

    Returns:
        Fields that the last stage shows already.
    """
    shown = [card.origin.row for card in cards]
    told = [stages.get(row, []) for row in shown]
    names = [name for name, _ in max(told, key=len, default=[])]
    for number, name in enumerate(names):
        arrays = [own[number][1] for own in told if len(own) > number]
        scale = range_of([array for array in arrays if not isinstance(array, Image.Image)])
        for card, own in zip(cards, told):
            if len(own) > number:
                _add_picture(card, f"{number}. {name}", own[number][1], scale)
    if not stages:
        return []
    return [
        name
        for name, values in rows.values.items()
        if all(
            own and field_equals(own[-1][1], values[row]) and is_picture(values[row]) for row, own in zip(shown, told)
        )
    ]


def field_equals(value: Any, array: np.ndarray) -> bool:
    """Whether the last stage of a sample is a field of it."""
    if isinstance(value, Image.Image):
        return False
    own = np.asarray(value)
    return own.shape == array.shape and own.dtype == array.dtype and own.tobytes() == array.tobytes()


def _add_picture(card: Card, name: str, value: Any, scale: tuple[float, float] | None) -> None:
    picture = as_picture(value, scale)
    if picture is None:
        return
    is_scaled = scale is not None and not isinstance(value, Image.Image)
    shape = value.size if isinstance(value, Image.Image) else np.asarray(value).shape
    sides = "x".join(map(str, shape))
    caption = f"{name} {sides}" + (f", {scale[0]:.3g} to {scale[1]:.3g}" if is_scaled and scale is not None else "")
    card.pictures.append((caption, picture))


def _in_words(value: np.ndarray) -> str:
    flat = value.reshape(-1)
    words = [str(int(each)) if value.dtype.kind in "biu" else f"{each:.3g}" for each in flat[:_MOST_NUMBERS].tolist()]
    more = ", ..." if flat.size > _MOST_NUMBERS else ""
    return words[0] if value.ndim == 0 else f"[{', '.join(words)}{more}]"
