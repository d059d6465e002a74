"""Samples for RoBERTa: one passage with masked tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from libai_data.data.datasets.bert import BertDataset
from libai_data.data.sources.indexed import IndexedSource
from libai_data.structures import Instance


class RobertaDataset(BertDataset):
    """Passages, <s> A </s>, in which tokens are masked, from `.bin/.idx` files; the masks change from epoch to epoch.

    Fields and arguments as those of `BertDataset`, without `ns_labels` and what is about pairs; `tokentype_ids` are 0.
    The sentences may be whole documents.

    Raises:
        ConfigError: An argument is out of range, a file is missing, or there is no document.
        FormatError: A file is broken.
    """

    _special_tokens = 2

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
        super().__init__(
            name,
            tokenizer,
            indexed_dataset,
            data_prefix,
            max_num_samples,
            mask_lm_prob,
            max_seq_length,
            short_seq_prob,
            seed,
            binary_head=False,
            masking_style=masking_style,
            max_ngrams=max_ngrams,
            whole_words=whole_words,
            cache_dir=cache_dir,
        )

    def __getitem__(self, index: int) -> Instance:
        """One sample; see the class for its fields."""
        fields = super().__getitem__(index).get_fields()
        return Instance(**{name: value for name, value in fields.items() if name != "ns_labels"})

    def _pairs(self) -> dict[str, Any]:
        return {}
