"""What BERT's, RoBERTa's and T5's datasets share: samples made of a corpus's sentences."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.datasets.combine import check_index
from libai_data.data.datasets.sentence_index import SentenceRule, sentence_samples
from libai_data.errors import ConfigError
from libai_data.data.sources.indexed import IndexedSource

_ATTEMPTS = 10


class SentenceCorpus:
    """Runs of sentences from an indexed dataset.

    Args:
        source: the dataset, or the prefix of its files.
        rule: how sentences are put together.
        cache_dir: folder for the index; by default `<prefix>.cache`; see `record_index.index_folder`.

    Raises:
        ConfigError: A file is missing, or no document has enough sentences.
        FormatError: A file is broken.
    """

    def __init__(self, source: IndexedSource | str | Path, rule: SentenceRule, cache_dir: str | Path | None) -> None:
        self.source = source if isinstance(source, IndexedSource) else IndexedSource(source)
        self.rule = rule
        self._samples = sentence_samples(self.source, rule, cache_dir)

    def __len__(self) -> int:
        return len(self._samples.first)

    def tokens(self, index: int) -> np.ndarray:
        """All tokens of a sample's sentences, a view of the memory map."""
        start = int(self._samples.start[index])
        return self.source.tokens[start : start + int(self.sizes(index).sum())]

    def sizes(self, index: int) -> np.ndarray:
        """Tokens of each sentence of a sample, int32 [sentences].

        Raises:
            IndexError: There is no such sample.
        """
        check_index(index, len(self))
        return self.source.sizes[int(self._samples.first[index]) : int(self._samples.stop[index])]

    def target(self, index: int) -> int:
        """How many tokens a sample may have."""
        return int(self._samples.target[index])

    def document_of(self, index: int) -> int:
        """The number of the document that a sample is from."""
        return int(np.searchsorted(self.source.doc_idx, self._samples.first[index], side="right")) - 1

    def random_passage(self, other_than: int, random: np.random.Generator) -> np.ndarray:
        """The rest of a random document from a random sentence on.

        Args:
            other_than: number of a document that it is not from, if there is another one with a sentence.
            random: draws.
        """
        bounds = self.source.doc_idx
        documents = self.source.num_documents
        number = other_than
        # Documents may be empty, and nearly all of them may be: a few attempts, then the one that is there.
        for _ in range(_ATTEMPTS):
            drawn = int(random.integers(documents))
            if drawn != other_than and bounds[drawn + 1] > bounds[drawn]:
                number = drawn
                break
        first, stop = int(bounds[number]), int(bounds[number + 1])
        sentence = int(random.integers(first, stop))
        return self.source.document(number)[int(self.source.sizes[first:sentence].sum()) :]

    def fingerprint(self, **arguments: Any) -> dict[str, Any]:
        """What decides the samples, beside the tokens themselves.

        Args:
            **arguments: of the dataset.
        """
        return {"corpus": self.source.fingerprint, **asdict(self.rule), **arguments}


def vocabulary_hash(tokenizer: Any) -> str:
    """A short hash of a tokenizer's vocabulary."""
    text = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def source_of(indexed_dataset: Any | None, data_prefix: str | Path | None) -> Any:
    """The source that LiBai's two arguments name.

    Raises:
        ConfigError: None of them is given.
    """
    if indexed_dataset is None and data_prefix is None:
        raise ConfigError("give data_prefix, the path of .bin and .idx without their endings, or indexed_dataset")
    return data_prefix if indexed_dataset is None else indexed_dataset
