"""Tell how well token frequencies alone predict a corpus, which a language model has to do better.

`python tools/unigram.py data/stdlib/train_text_document data/stdlib/test_text_document`
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from libai_data.data.sources import IndexedSource
from libai_data.errors import ConfigError

_COUNTED_AT_ONCE = 1 << 24


def unigram_perplexity(train: IndexedSource, test: IndexedSource) -> float:
    """Perplexity on `test` of the model that gives each token its frequency in `train`, whatever stands before it.

    Each token counts once more than it occurs (Laplace), so that none is impossible.

    Raises:
        ConfigError: There is no token in one of them, or a negative one.
    """
    size = 1 + max(_largest(train), _largest(test))
    known, asked = _counts(train, size) + 1, _counts(test, size)
    return math.exp(-float((asked * np.log(known / known.sum())).sum()) / float(asked.sum()))


def _largest(source: IndexedSource) -> int:
    if not len(source.tokens) or int(source.tokens.min()) < 0:
        raise ConfigError(f"{source.prefix} has no tokens of a vocabulary")
    return int(source.tokens.max())


def _counts(source: IndexedSource, size: int) -> np.ndarray:
    counts = np.zeros(size, np.int64)
    for first in range(0, len(source.tokens), _COUNTED_AT_ONCE):
        counts += np.bincount(source.tokens[first : first + _COUNTED_AT_ONCE], minlength=size)
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: print the perplexity."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("train", help="prefix of the .bin and .idx file to count tokens in")
    arguments.add_argument("test", help="prefix of those to predict")
    asked = arguments.parse_args(argv)
    found = unigram_perplexity(IndexedSource(asked.train), IndexedSource(asked.test))
    print(f"Unigram perplexity of {asked.test}: {found:.1f}")


if __name__ == "__main__":
    main()
