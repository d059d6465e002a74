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


class SentenceDataset:
    """Base of the datasets whose samples are runs of a corpus's sentences.

    Args:
        tokenizer: has `get_vocab()`.
        indexed_dataset: the sentences, or None to open those of `data_prefix`.
        data_prefix: path of the two files without their endings.
        rule: how sentences are put together.
        cache_dir: folder for the index; by default `<prefix>.cache`; see `record_index.index_folder`.
        **arguments: what else decides the samples, for the fingerprint.

    Raises:
        ConfigError: There are no sentences, or no document has enough of them.
        FormatError: A file is broken.
    """

    def __init__(
        self,
        tokenizer: Any,
        indexed_dataset: IndexedSource | None,
        data_prefix: str | Path | None,
        rule: SentenceRule,
        cache_dir: str | Path | None,
        **arguments: Any,
    ) -> None:
        source = data_prefix if indexed_dataset is None else indexed_dataset
        if source is None:
            raise ConfigError("give data_prefix, the path of .bin and .idx without their endings, or indexed_dataset")
        self.source = source if isinstance(source, IndexedSource) else IndexedSource(source)
        self._samples = sentence_samples(self.source, rule, cache_dir)
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True).encode()
        self._fingerprint: dict[str, Any] = {
            "corpus": self.source.fingerprint,
            **asdict(rule),
            "vocabulary": hashlib.blake2b(vocabulary, digest_size=8).hexdigest(),
            **arguments,
        }

    def __len__(self) -> int:
        return len(self._samples.first)

    def fingerprint(self) -> dict[str, Any]:
        """What decides the samples, beside the tokens themselves."""
        return self._fingerprint

    def _sizes(self, index: int) -> np.ndarray:
        """Tokens of each sentence of a sample, int32 [sentences]."""
        check_index(index, len(self))
        return self.source.sizes[int(self._samples.first[index]) : int(self._samples.stop[index])]

    def _tokens(self, index: int) -> np.ndarray:
        """All tokens of a sample's sentences, a view of the memory map."""
        start = int(self._samples.start[index])
        return self.source.tokens[start : start + int(self._sizes(index).sum())]

    def _target(self, index: int) -> int:
        """How many tokens a sample may have."""
        return int(self._samples.target[index])

    def _passage_of_another_document(self, index: int, random: np.random.Generator) -> np.ndarray:
        """The rest of a random document from a random sentence on; of the sample's own if there is no other one."""
        bounds = self.source.doc_idx
        number = own = int(np.searchsorted(bounds, self._samples.first[index], side="right")) - 1
        # Documents may be empty, and nearly all of them may be: a few attempts, then the one that is there.
        for _ in range(_ATTEMPTS):
            drawn = int(random.integers(self.source.num_documents))
            if drawn != own and bounds[drawn + 1] > bounds[drawn]:
                number = drawn
                break
        first, stop = int(bounds[number]), int(bounds[number + 1])
        sentence = int(random.integers(first, stop))
        return self.source.document(number)[int(self.source.sizes[first:sentence].sum()) :]
