"""Samples for RoBERTa: one passage with masked tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.datasets.bert import truncate_pair
from libai_data.data.datasets.masking import Masker, masking_of_style, padded, special_id, vocabulary_tables
from libai_data.data.datasets.sentence_index import SentenceRule
from libai_data.data.datasets.sentences import SentenceCorpus, source_of, vocabulary_hash
from libai_data.data.random.sample_random import sample_generator
from libai_data.data.sources.indexed import IndexedSource
from libai_data.structures import DistTensorData, Instance

_NO_LABEL = -1


class RobertaDataset:
    """Passages, <s> A </s>, in which tokens are masked, from `.bin/.idx` files; the masks change from epoch to epoch.

    Fields as those of `BertDataset`, without `ns_labels`; `tokentype_ids` are 0. The arguments are the same as there.

    Args:
        name: for people; the sample does not depend on it.
        tokenizer: has `get_vocab()` and the ids `cls_token_id`, `sep_token_id`, `mask_token_id`, `pad_token_id`.
        indexed_dataset: the sentences (or whole documents), or None to open those of `data_prefix`.
        data_prefix: path of the two files without their endings.
        max_num_samples: the corpus is repeated until there are so many; None for once.
        mask_lm_prob: share of the tokens to predict.
        max_seq_length: tokens of a sample, special ones included; shorter samples are padded.
        short_seq_prob: share of samples that aim at a random length.
        seed: decides which samples are short ones.
        masking_style: "bert", or "bert-cn-wwm", which masks whole words of Chinese.
        max_ngrams: words in a row that are masked together, at most.
        whole_words: whether words are masked as a whole.
        cache_dir: folder for the index; by default `<data_prefix>.cache`; see `record_index.index_folder`.

    Raises:
        ConfigError: An argument is out of range, a file is missing, or there is no document.
        FormatError: A file is broken.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        indexed_dataset: IndexedSource | None = None,
        data_prefix: str | Path | None = None,
        max_num_samples: int | None = None,
        mask_lm_prob: float = 0.15,
        max_seq_length: int = 512,
        short_seq_prob: float = 0.0,
        seed: int = 1234,
        masking_style: str = "bert",
        max_ngrams: int = 3,
        whole_words: bool = True,
        cache_dir: str | Path | None = None,
    ) -> None:
        self.name = name
        self.max_seq_length = max_seq_length
        self._cls, self._sep, self._pad = (special_id(tokenizer, role) for role in ("cls", "sep", "pad"))
        masking = masking_of_style(masking_style, mask_lm_prob, max_ngrams, whole_words)
        self._masker = Masker(vocabulary_tables(tokenizer), special_id(tokenizer, "mask"), masking)
        rule = SentenceRule(max_seq_length - 2, 1, short_seq_prob, seed, max_num_samples)
        self._corpus = SentenceCorpus(source_of(indexed_dataset, data_prefix), rule, cache_dir)
        self._fingerprint = self._corpus.fingerprint(
            vocabulary=vocabulary_hash(tokenizer), masking=[masking_style, mask_lm_prob, max_ngrams, whole_words]
        )

    def __len__(self) -> int:
        return len(self._corpus)

    def __getitem__(self, index: int) -> Instance:
        """One sample; see the class for its fields."""
        random = sample_generator()
        whole = self._corpus.tokens(index)
        passage, _ = truncate_pair(whole, whole[:0], self._corpus.target(index), random)
        tokens = np.empty(len(passage) + 2, np.int64)
        tokens[0], tokens[1:-1], tokens[-1] = self._cls, passage, self._sep
        special = np.zeros(len(tokens), bool)
        special[[0, -1]] = True
        masked, chosen = self._masker.mask(tokens, special, random)
        length = self.max_seq_length
        return Instance(
            input_ids=DistTensorData(padded(masked, length, self._pad)),
            attention_mask=DistTensorData(padded(np.ones(len(tokens), bool), length, False)),
            tokentype_ids=DistTensorData(np.zeros(length, np.int64)),
            lm_labels=DistTensorData(padded(np.where(chosen, tokens, _NO_LABEL), length, _NO_LABEL), placement_idx=-1),
            loss_mask=DistTensorData(padded(chosen, length, False), placement_idx=-1),
        )

    def fingerprint(self) -> dict[str, Any]:
        """What decides the samples, beside the tokens themselves."""
        return self._fingerprint
