"""Sentences of a text, by rules for the punctuation of many scripts; and pieces of long texts."""

from __future__ import annotations

import re
from collections.abc import Iterator

# A full stop behind these words ends no sentence. `_ends_sentence` also refuses initials and single letters.
_ABBREVIATIONS = frozenset(
    re.split(
        r"\s+",
        "mr mrs ms dr prof sr jr st vs etc e.g i.e cf fig figs eq eqs no nos vol vols pp ed eds al approx dept est inc "
        "ltd co corp gen col sgt capt lt rev hon sen rep gov pres jan feb mar apr jun jul aug sep sept oct nov dec",
    )
)
_CLOSERS = "\"'”’»)\\]}」』）】》"
# Matches only at the beginning of a run of marks or of white space, so that each run is scanned once.
_BOUNDARY = re.compile(
    # Chinese, Devanagari, Arabic, Urdu, Armenian, Ethiopic, Burmese, Khmer: the mark alone ends the sentence.
    rf"[。！？…｡।॥؟۔։።፧။។៕]+[{_CLOSERS}]*\s*"
    # Others: the mark, white space, and a character that can begin a sentence. The full stops that `_ends_sentence`
    # refuses most often do not match: before a small letter, or behind an initial.
    rf"|(?<![.!?])(?!\.+[ \n][a-z]|(?<=[ \n][A-Z])\.[ \n]\S)[.!?]+[{_CLOSERS}]*\s+(?=[^\W_]|[\"'“‘«(\[{{\-–—¿¡])"
    # A blank line.
    r"|(?<![ \t\r])[ \t\r]*\n[ \t\r]*\n\s*"
)
_OPENERS = "(\"'“‘["


def split_sentences(text: str, keep_newlines: bool = False) -> list[str]:
    """Split a text into sentences, none of them empty or white space alone. With `keep_newlines`, the white space
    behind a sentence, and before the first one, is kept in the sentence; so nothing of the text is lost."""
    sentences, start = [], 0
    for match in _BOUNDARY.finditer(text, len(text) - len(text.lstrip())):
        begin, end = match.span()
        if text[begin] not in ".!?" or _ends_sentence(text, start, begin, end):
            sentences.append(text[start:end])
            start = end
    sentences.append(text[start:])
    if keep_newlines:
        return [sentence for sentence in sentences if sentence.strip()]
    return [stripped for sentence in sentences if (stripped := sentence.strip())]


def pieces_of(text: str, longest: int) -> Iterator[str]:
    """Cut a text into pieces, where tokenizers usually begin a new word: behind a line's end, or before a space.

    Pieces have at most `longest` characters. All but the last one have at least half as many.
    """
    start = 0
    while len(text) - start > longest:
        low, high = start + longest // 2, start + longest
        cut = 1 + text.rfind("\n", low, high)
        if not cut:
            cut = text.rfind(" ", low + 1, high)
        cut = cut if cut > low else high
        yield text[start:cut]
        start = cut
    yield text[start:]


def _ends_sentence(text: str, start: int, begin: int, end: int) -> bool:
    """Whether the marks from `begin` on, with white space up to `end`, end the sentence that begins at `start`."""
    # "Really?" he asked.
    if text[begin] != "." or text[begin + 1] == ".":
        return not text[end].islower() or text[begin:end].rstrip()[-1] in "!?"
    # For most full stops, the characters around them decide.
    if text[end].islower():
        return False
    if begin == start or (before := text[begin - 1]).isspace():
        return True
    if begin - 1 == start or text[begin - 2] in " \n\t":
        return not (before.isupper() and before.isalpha())
    # Only the last characters are searched for a word: a text without white space would be scanned again and again.
    word = text[begin - 24 if begin - 24 > start else start : begin].rsplit(None, 1)[-1].lstrip(_OPENERS)
    return not (word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isalpha() and word.isupper()))
