"""The base class of the datasets for BERT, RoBERTa and T5: samples made of a corpus's sentences."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.datasets.combine import check_index
from libai_data.data.datasets.document_parts import report_tokens
from libai_data.data.datasets.fingerprint import hash_of
from libai_data.data.datasets.passage_index import Passages, find_passages
from libai_data.data.datasets.sentence_index import SentenceRule, SentenceSamples, find_samples
from libai_data.data.sources.indexed import IndexedSource
from libai_data.errors import ConfigError

_VERSION = 2
_ATTEMPTS = 10


class SentenceDataset:
    """Base of the datasets whose samples are made of a corpus's sentences, by a rule: pairs of passages, or one passage
    each if `min_sentences` is 1. With `separators`, a passage needs room for one token between two documents. Other
    arguments decide the samples too, for the fingerprint."""

    def __init__(
        self,
        tokenizer: Any,
        indexed_dataset: IndexedSource | None,
        data_prefix: str | Path | None,
        rule: SentenceRule,
        cache_dir: str | Path | None,
        separators: bool,
        **arguments: Any,
    ) -> None:
        source = data_prefix if indexed_dataset is None else indexed_dataset
        if source is None:
            raise ConfigError("give data_prefix, the path of .bin and .idx without their endings, or indexed_dataset")
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True).encode()
        self._decides = {"vocabulary": hash_of(vocabulary, 8), **arguments}
        self._rule, self._cache_dir, self._separators = rule, cache_dir, separators
        self.read_source(source if isinstance(source, IndexedSource) else IndexedSource(source))

    def read_source(self, source: IndexedSource, share: float = 1.0) -> None:
        """Find the samples of a corpus, which replace the samples of an earlier corpus. If the dataset has a given
        number of samples, use a `share` of the number. A ConfigError if the documents are too few for one sample."""
        if self._rule.max_num_samples is not None:
            self._rule = replace(self._rule, max_num_samples=ceil(self._rule.max_num_samples * share))
        self.source = source
        rule, separators = self._rule, self._separators
        kind = SentenceSamples if rule.min_sentences > 1 else Passages
        depends_on = {"version": _VERSION, "corpus": source.fingerprint, **asdict(rule), "separators": separators}

        def build() -> list[np.ndarray]:
            if kind is SentenceSamples:
                return list(find_samples(source, rule))
            return list(find_passages(source, rule, separators))

        self._samples: Any = kind(*source.cached("sentences", depends_on, build, self._cache_dir))
        report_tokens(self, int(self._samples.used[0]))

    @property
    def repeated_by(self) -> str:
        """The argument that repeats documents in several samples, or ""."""
        return "" if self._rule.max_num_samples is None else f"max_num_samples={self._rule.max_num_samples}"

    def __len__(self) -> int:
        return len(self._samples.start)

    def fingerprint(self) -> dict[str, Any]:
        """All values that decide the samples; the tokens are identified by the corpus's fingerprint."""
        return {"version": _VERSION, "corpus": self.source.fingerprint, **asdict(self._rule), **self._decides}

    def _passage(self, index: int) -> list[np.ndarray]:
        """The tokens of a sample's passage, one array for each of its documents; views of the memory map."""
        check_index(index, len(self))
        start, stop, first, last = (int(array[index]) for array in self._samples[:4])
        bounds = [start, *np.unique(self.source.document_offsets(first, last)).tolist(), stop]
        return [self.source.tokens[low:high] for low, high in zip(bounds, bounds[1:])]

    def _sentences(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        """A sample for pairs: the number of tokens of each sentence, the tokens, and the sample's largest length."""
        check_index(index, len(self))
        first, stop, start, target = (int(array[index]) for array in self._samples[:4])
        sizes = self.source.sizes[first:stop]
        sizes = sizes[sizes > 0]
        return sizes, self.source.tokens[start : start + int(sizes.sum())], target

    def _passage_of_another_document(self, index: int, random: np.random.Generator) -> np.ndarray:
        """The end of a random other document, from a random sentence on; of the same document if none is found. Empty
        sentences do not count."""
        bounds, sizes = self.source.doc_idx, self.source.sizes
        number = own = int(np.searchsorted(bounds, self._samples.first[index], side="right")) - 1
        # Nearly all documents may be empty. So there are a few attempts; after them, the sample's own document is used.
        for _ in range(_ATTEMPTS):
            drawn = int(random.integers(self.source.num_documents))
            if drawn != own and sizes[bounds[drawn] : bounds[drawn + 1]].any():
                number = drawn
                break
        first, stop = int(bounds[number]), int(bounds[number + 1])
        full = np.flatnonzero(sizes[first:stop])
        sentence = first + int(full[random.integers(len(full))])
        return self.source.document(number)[int(sizes[first:sentence].sum()) :]
