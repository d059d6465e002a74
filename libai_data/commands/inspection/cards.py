"""Cards: each shows one sample, its fields as small pictures, as tokens, or as numbers."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, Callable, NamedTuple

import numpy as np
from PIL import Image

from libai_data.commands.inspection.fields import channels_at, is_loss_mask, is_padding_mask, is_picture, is_tokens
from libai_data.commands.inspection.step_rows import RowOrigin, Stage, StepRows

_MOST_TOKENS = 160
_MOST_NUMBERS = 6
COUNTED, PADDING, PLAIN = "counted", "padding", "plain"
_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "decode": lambda decode, number: decode([number]),
    "id_to_token": lambda token_of, number: token_of(number),
    "convert_ids_to_tokens": lambda convert, number: convert([number])[0],
}
SIDE = 96
"""The longer side of a picture has at most so many pixels; a small picture is enlarged by an integer factor."""


@dataclass
class Card:
    """The fields of one sample, as the page shows them."""

    origin: RowOrigin
    pictures: list[tuple[str, Image.Image]] = field(default_factory=list)  # (caption, picture)
    texts: list[tuple[str, Sequence[Token], int]] = field(default_factory=list)  # (field, tokens, how many more)
    numbers: list[tuple[str, str]] = field(default_factory=list)  # (field, its numbers in words)

    @property
    def heading(self) -> str:
        """Row, data rank, index and epoch of the sample, in words."""
        origin = self.origin
        where = f"row {origin.row}, data rank {origin.shard}"
        return where if origin.index is None else f"{where}: sample {origin.index}, epoch {origin.epoch}"


def rows_to_show(rows: StepRows, count: int) -> list[int]:
    """Choose `count` rows: the first rows of each data-parallel rank, the same number of each if possible."""
    of_shard: dict[int, list[int]] = {}
    for origin in rows.origins:
        of_shard.setdefault(origin.shard, []).append(origin.row)
    in_turn = [row for turn in zip_longest(*of_shard.values()) for row in turn if row is not None]
    return sorted(in_turn[:count])


def cards_of(
    rows: StepRows, shown: Sequence[int], stages: dict[int, list[Stage]], text_of: Callable[[int], str] | None
) -> list[Card]:
    """The cards of rows. `stages` maps rows to the stages that their dataset reports; `text_of` decodes a token."""
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
    """Add pictures of the stages; returns the fields that are equal to the last stage, and so need no picture."""
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
            own and _field_equals(own[-1][1], values[row]) and is_picture(values[row]) for row, own in zip(shown, told)
        )
    ]


def _field_equals(value: Any, array: np.ndarray) -> bool:
    """Whether the last stage of a sample (`value`) is equal to a field (`array`)."""
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


def range_of(values: Any) -> tuple[float, float] | None:
    """The smallest and largest finite number of arrays that share one scale; None for 8-bit pictures."""
    arrays = [np.asarray(value) for value in values]
    if all(array.dtype == np.uint8 for array in arrays):
        return None
    finite = [array[np.isfinite(array)] for array in arrays]
    filled = [array for array in finite if array.size]
    if not filled:
        return (0.0, 1.0)
    return float(min(array.min() for array in filled)), float(max(array.max() for array in filled))


def as_picture(value: Any, scale: tuple[float, float] | None) -> Image.Image | None:
    """Make a picture of a transform's result; its longer side has at most `SIDE` pixels, and NaN and infinity are red.

    Args:
        value: a Pillow image, or an array [H, W], [C, H, W] or [H, W, C] with 1, 3 or 4 channels; others give None.
        scale: the numbers that become black and white; None if the numbers are 8-bit values already.
    """
    if isinstance(value, Image.Image):
        return _sized(value.convert("RGB"))
    array = np.asarray(value)
    if not is_picture(array):
        return None
    dim = channels_at(array.shape)
    channels_last = array[..., None] if dim == -1 else np.moveaxis(array, dim or 0, -1) if dim == 0 else array
    channels_last = np.repeat(channels_last, 3, axis=-1) if channels_last.shape[-1] == 1 else channels_last[..., :3]
    if scale is None:
        return _sized(Image.fromarray(np.ascontiguousarray(channels_last.astype(np.uint8))))
    low, high = scale
    numbers = channels_last.astype(np.float64)
    broken = ~np.isfinite(numbers).all(axis=-1)
    pixels = np.clip((np.where(np.isfinite(numbers), numbers, low) - low) / ((high - low) or 1.0), 0, 1) * 255
    pixels[broken] = (255, 0, 0)
    return _sized(Image.fromarray(np.ascontiguousarray(np.round(pixels).astype(np.uint8))))


def data_uri(picture: Image.Image) -> str:
    """A picture as PNG in a `data:` address, so that the page needs no other file."""
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def _sized(picture: Image.Image) -> Image.Image:
    longer = max(picture.size)
    if longer > SIDE:
        shrunk = tuple(max(1, round(side * SIDE / longer)) for side in picture.size)
        return picture.resize((shrunk[0], shrunk[1]), Image.Resampling.BOX)
    factor = SIDE // longer
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


# A field is a label if its name contains one of these words.
_LABELS = ("label", "target")


class Token(NamedTuple):
    """A token. Its text is "·" if its id is negative. Its kind says whether the loss counts it, or it is padding."""

    id: int
    text: str
    kind: str


def decoder_of(tokenizer: Any) -> Callable[[int], str] | None:
    """A function from a token's id to its text; None if the tokenizer has no method to decode an id."""
    tries = [partial(_DECODERS[name], getattr(tokenizer, name)) for name in _DECODERS if hasattr(tokenizer, name)]
    if not tries:
        return None

    def text_of(number: int) -> str:
        for attempt in tries:
            try:
                text = attempt(number)
            except (IndexError, KeyError, ValueError, TypeError, OverflowError):  # the tokenizer does not know the id
                continue
            # Many tokenizers decode special tokens to the empty string.
            if isinstance(text, str) and text:
                return text
        return f"⟨{number}⟩"

    return text_of


def tokens_of(
    ids: np.ndarray, sample: Mapping[str, np.ndarray], text_of: Callable[[int], str] | None, most: int
) -> tuple[Sequence[Token], int]:
    """The first `most` tokens of a field, int [length], and the number of the others.

    Masks of the same length in the sample decide the kinds of the tokens.
    """
    counted = _mask(sample, ids, is_loss_mask)
    if counted is not None:
        counted = _carrying_loss(counted, ids, sample)
    # If a loss mask counts all tokens that are not padding, colours would show nothing new.
    present = _mask(sample, ids, is_padding_mask)
    there = np.ones(len(ids), dtype=bool) if present is None else present
    tells = counted is not None and not np.array_equal(counted & there, there)
    tokens = []
    for place, number in enumerate(ids[:most].tolist()):
        kind = PADDING if not there[place] else COUNTED if tells and counted is not None and counted[place] else PLAIN
        # A negative id marks a label that the loss ignores. A tokenizer may read it as an index from the end.
        text = "·" if number < 0 else str(number) if text_of is None else text_of(number)
        tokens.append(Token(number, text, kind))
    return tokens, max(0, len(ids) - most)


def _carrying_loss(counted: np.ndarray, ids: np.ndarray, sample: Mapping[str, np.ndarray]) -> np.ndarray:
    """Which tokens of a field the model predicts, bool [length]; `counted` marks places of the labels.

    If the labels are the next tokens of the field, the token at place i + 1 is counted if `counted` marks place i.
    """
    for name, labels in sample.items():
        if not any(word in name.lower() for word in _LABELS) or labels.shape != ids.shape or labels is ids:
            continue
        is_next = ids[1:] == labels[:-1]
        if (labels == ids).all() or is_next.mean() <= (ids == labels).mean():
            continue
        # The token after the end of a packed document belongs to another document, and is not a label.
        return np.concatenate([[False], counted[:-1] & is_next])
    return counted


def _mask(
    sample: Mapping[str, np.ndarray], ids: np.ndarray, is_it: Callable[[str, np.ndarray], bool]
) -> np.ndarray | None:
    for name, value in sample.items():
        if is_it(name, value) and value.shape == ids.shape and value.dtype.kind in "biuf":
            return value != 0
    return None
