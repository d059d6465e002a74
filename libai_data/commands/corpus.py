"""The command: `libai-data corpus PREFIX`, statistics of an indexed dataset of tokens."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

import numpy as np

from libai_data.atomic_files import output_file, written_whole
from libai_data.commands.console import aligned, print_lines
from libai_data.data.sources.indexed import IndexedSource
from libai_data.data.text.tokenizer import TextTokenizer, load_tokenizer
from libai_data.errors import ConfigError

_COUNTED_AT_ONCE = 1 << 24
_WIDEST_BAR = 40
_PICTURE = (720, 24, 150)  # pixels: width of the picture, height of a row, width of the row's name


@dataclass(frozen=True)
class Corpus:
    """Statistics of an indexed dataset."""

    lengths: np.ndarray  # int64 [documents], number of tokens of each document
    duplicates: int  # documents with the same tokens as an earlier one
    duplicate_tokens: int  # tokens of these documents
    special: dict[str, int] = field(default_factory=dict)  # special token -> how often it occurs
    sequences: int = 0
    dtype: str = ""

    def histogram(self) -> list[tuple[str, int, int]]:
        """For each range of lengths, between powers of two: the range in words, its documents, and their tokens."""
        classes = np.frexp(self.lengths.astype(np.float64))[1]
        documents = np.bincount(classes, minlength=1)
        tokens = np.bincount(classes, self.lengths, minlength=1).astype(np.int64)
        rows = []
        for number in range(int(classes.min(initial=0)), len(documents)):
            low, high = (1 << number) >> 1, (1 << number) - 1
            rows.append((f"{low}" if low == high else f"{low} to {high}", int(documents[number]), int(tokens[number])))
        return rows


def examine(source: IndexedSource, tokenizer: TextTokenizer | None = None) -> Corpus:
    """Read a corpus once, with 24 bytes of memory a document; a ConfigError if it does not fit the tokenizer."""
    offsets = source.document_offsets()
    lengths = np.diff(offsets)
    digests = np.fromiter(_digests(source, offsets), np.uint64, len(lengths))
    # Empty documents do not count as duplicates of each other.
    _, first = np.unique(digests[lengths > 0], return_index=True)
    full = lengths[lengths > 0]
    special = {} if tokenizer is None else _special_counts(source, tokenizer)
    tokens = int(full.sum() - full[first].sum())
    return Corpus(lengths, len(full) - len(first), tokens, special, len(source), str(source.dtype))


def _digests(source: IndexedSource, offsets: np.ndarray) -> Iterator[int]:
    start = int(offsets[0])
    for stop in offsets[1:]:
        data = source.tokens[start:stop].tobytes()
        yield int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        start = int(stop)


def _special_counts(source: IndexedSource, tokenizer: TextTokenizer) -> dict[str, int]:
    counts = np.zeros(len(tokenizer), np.int64)
    for first in range(0, len(source.tokens), _COUNTED_AT_ONCE):
        some = source.tokens[first : first + _COUNTED_AT_ONCE]
        if int(some.max()) >= len(counts):
            raise ConfigError(
                f"{source.prefix} has the token {int(some.max())}, but the tokenizer has only {len(counts)} tokens; "
                "give the tokenizer that the corpus was made with (--tokenizer)"
            )
        counts += np.bincount(some, minlength=len(counts))
    return {tokenizer.id_to_token(ident): int(counts[ident]) for ident in tokenizer.special_ids if counts[ident]}


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="libai-data corpus", description=__doc__)
    arguments.add_argument("prefix", help="path of .bin and .idx without their endings")
    arguments.add_argument("--tokenizer", metavar="PATH", help="also count the special tokens of this tokenizer")
    arguments.add_argument(
        "--picture", type=output_file, metavar="FILE.svg", help="also draw a histogram of the lengths of documents"
    )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 1 if a file cannot be read or written."""
    asked = parser().parse_args(argv)
    return print_lines("corpus", lambda: _corpus(asked))


def _corpus(asked: argparse.Namespace) -> Iterator[str]:
    if asked.picture and asked.picture.suffix.lower() != ".svg":
        raise ConfigError(f"--picture is {asked.picture}; the picture is SVG, so its name must end with .svg")
    tokenizer = load_tokenizer(asked.tokenizer) if asked.tokenizer else None
    found = examine(IndexedSource(asked.prefix), tokenizer)
    yield from summary(found)
    if asked.picture:
        asked.picture.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(asked.picture) as unfinished:
            unfinished.write_text(picture(found, asked.prefix), encoding="utf-8")
        yield f"The picture is {asked.picture}."


def summary(found: Corpus) -> list[str]:
    """The statistics as lines of text."""
    tokens, count = int(found.lengths.sum()), len(found.lengths)
    lines = [
        f"{count:,} documents of {found.sequences:,} sequences, {tokens:,} tokens ({found.dtype}); "
        f"{int((found.lengths == 0).sum()):,} documents are empty"
    ]
    if count:
        median, longest = int(np.median(found.lengths)), int(found.lengths.max())
        lines.append(f"Tokens per document: {tokens / count:,.1f} on average, median {median:,}, longest {longest:,}")
    lines.append(
        f"Exact duplicates: {found.duplicates:,} documents ({_share(found.duplicates, count)}) with "
        f"{found.duplicate_tokens:,} tokens ({_share(found.duplicate_tokens, tokens)}) repeat an earlier one"
    )
    if found.special:
        total = sum(found.special.values())
        lines.append(f"Special tokens: {total:,} ({_share(total, tokens)})")
        lines += [f"  {line}" for line in aligned([(name, f"{n:,}") for name, n in found.special.items()])]
    rows = found.histogram()
    most = max((documents for _, documents, _ in rows), default=0)
    table = [("tokens", "documents", "their tokens", "")]
    for name, documents, own in rows:
        bar = "#" * round(_WIDEST_BAR * documents / max(most, 1))
        table.append((name, f"{documents:,}", _share(own, tokens), bar))
    return [*lines, *aligned(table)]


def picture(found: Corpus, title: str) -> str:
    """The histogram of lengths as SVG: a bar for the number of documents, and their share of all tokens in words."""
    width, height, names = _PICTURE
    rows = found.histogram()
    most = max((documents for _, documents, _ in rows), default=0)
    tokens = int(found.lengths.sum())
    drawn = [f'<text x="8" y="{height - 8}">{escape(title)}: documents by their tokens</text>']
    for number, (name, documents, own) in enumerate(rows, 1):
        top = number * height
        bar = round((width - names - 200) * documents / max(most, 1))
        drawn.append(f'<text x="{names - 8}" y="{top + 16}" text-anchor="end">{name}</text>')
        drawn.append(f'<rect x="{names}" y="{top + 3}" width="{bar}" height="{height - 6}" fill="#4878a8"/>')
        words = f"{documents:,} ({_share(own, tokens)} of tokens)"
        drawn.append(f'<text x="{names + bar + 6}" y="{top + 16}">{words}</text>')
    size = f'width="{width}" height="{(len(rows) + 1) * height + 8}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(drawn) + "\n</svg>\n"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"
