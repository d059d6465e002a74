"""Facts about a tokenizer's vocabulary that datasets need: ids of special tokens, and which tokens begin words."""

from __future__ import annotations

import re
import unicodedata
from typing import Any, NamedTuple

import numpy as np

from libai_data.errors import ConfigError

_ROLES = ("cls", "sep", "mask", "pad", "bos", "eos", "unk")
_PIECE = "##"
# A token that begins a word starts with this character: in sentencepiece, and in byte-level BPE.
_SPACE, _BYTE_LEVEL_SPACE = "\u2581", "\u0120"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>\Z")
# Scripts whose words have no spaces between them, from first to last character: Thai, Lao and Tibetan; Myanmar; Khmer;
# Tai Le to Khmer symbols; Tai Tham; Balinese; Chinese and Japanese with their marks, and Yi; Javanese; more of Myanmar
# and Tai Viet; ideographs, twice; wide and narrow forms; more ideographs.
_WITHOUT_SPACES = (
    (0x0E00, 0x0FFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x1950, 0x19FF),
    (0x1A20, 0x1AAF),
    (0x1B00, 0x1B7F),
    (0x2E80, 0xA4CF),
    (0xA980, 0xA9FF),
    (0xAA60, 0xAADF),
    (0xF900, 0xFAFF),
    (0xFF00, 0xFFEF),
    (0x1B000, 0x1B16F),
    (0x20000, 0x3FFFF),
)


def special_id(tokenizer: Any, role: str) -> int:
    """The id of a special token such as "mask": `mask_token_id` of a tokenizer; a ConfigError if it has none."""
    ident = getattr(tokenizer, f"{role}_token_id", None)
    if ident is None:
        raise ConfigError(f"the tokenizer has no {role} token ({role}_token_id is None), which this dataset needs")
    return int(ident)


class VocabularyTables(NamedTuple):
    """Facts about tokens that masking needs, by the tokens' ids."""

    continues: np.ndarray  # bool [ids], whether a token continues the word of the token before it
    # Int64 [ids], for a Chinese character within a word the token without "##"; for others the same id.
    unmarked: np.ndarray
    ordinary: np.ndarray  # int64 [n], ids for random replacements: all except special tokens


def vocabulary_tables(tokenizer: Any) -> VocabularyTables:
    """Tables of a tokenizer's vocabulary; a ConfigError if it has only special tokens.

    Words are found by "##" (WordPiece), or by the white space before a token (byte-level BPE, sentencepiece).
    Each character of a script without spaces begins a word too, unless it is a combining mark.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    size = 1 + max(vocabulary.values())
    continues = np.zeros(size, bool)
    unmarked = np.arange(size, dtype=np.int64)
    wordpiece = any(token.startswith(_PIECE) for token in vocabulary)
    sentencepiece = not wordpiece and any(token.startswith(_SPACE) for token in vocabulary)
    byte_level = not (wordpiece or sentencepiece) and any(token.startswith(_BYTE_LEVEL_SPACE) for token in vocabulary)
    for token, ident in vocabulary.items():
        if wordpiece:
            inner = token[len(_PIECE) :] if token.startswith(_PIECE) else ""
            # "##" before one Chinese character marks a character within a word; see `ChineseWordEncoder`.
            is_mark = len(inner) == 1 and "\u4e00" <= inner <= "\u9fa5"
            continues[ident] = is_mark or bool(inner and not _begins_word(inner.encode()))
            if is_mark:
                unmarked[ident] = vocabulary.get(inner, ident)
        elif sentencepiece:
            byte = _BYTE.match(token)
            content = bytes([int(byte.group(1), 16)]) if byte else token.encode(errors="replace")
            continues[ident] = not (token.startswith(_SPACE) or _begins_word(content))
        elif byte_level:
            continues[ident] = not (token.startswith(_BYTE_LEVEL_SPACE) or _begins_word(_bytes_of(token)))
    special = {getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES}
    for name in ("additional_special_tokens_ids", "special_ids"):
        special |= set(getattr(tokenizer, name, None) or ())
    ordinary = np.array(sorted(set(vocabulary.values()) - special), np.int64)
    if not len(ordinary):
        raise ConfigError("the tokenizer's vocabulary has no tokens but special ones")
    return VocabularyTables(continues, unmarked, ordinary)


def _begins_word(content: bytes) -> bool:
    """Whether a token begins with white space such as the end of a line, with a character of a script without spaces,
    or with the first bytes of one."""
    lead = content[0] if content else 0
    length = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 1
    if length == 1 or lead > 0xF4:
        return content[:1].isspace()
    known = content[:length]
    # If a token ends within a character, the other bytes are unknown; so all possible characters must be in one range.
    ends = [(known + filler * (length - len(known))).decode(errors="replace") for filler in (b"\x80", b"\xbf")]
    if len(known) == length and unicodedata.category(ends[0][0]).startswith("M"):
        return False
    low, high = (ord(end[0]) for end in ends)
    return any(first <= low and high <= last for first, last in _WITHOUT_SPACES)


def _bytes_of(token: str) -> bytes:
    """The bytes of a token of byte-level BPE; for a token that is plain text, such as a special token, its text."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode(errors="replace")


def _bytes_of_characters() -> dict[str, int]:
    """Character in GPT-2's vocabulary -> the byte that it represents."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {**{chr(byte): byte for byte in shown}, **{chr(256 + n): byte for n, byte in enumerate(hidden)}}


_BYTE_OF = _bytes_of_characters()
