"""Samples with masked tokens: pairs of passages for BERT, single passages for RoBERTa."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.datasets.masking import Masker, Masking, padded
from libai_data.data.datasets.sentence_dataset import SentenceDataset
from libai_data.data.datasets.sentence_index import SentenceRule
from libai_data.data.datasets.vocabulary import special_id, vocabulary_tables
from libai_data.data.random.sample_random import sample_generator
from libai_data.data.sources.indexed import IndexedSource
from libai_data.errors.argument_rules import check_types, one_of, with_python_numbers
from libai_data.structures import DistTensorData, Instance

_RULES = {"pair_task": one_of("order", "next"), "masking_style": one_of("bert", "bert-cn-wwm")}
_NO_LABEL = -1


class BertDataset(SentenceDataset):
    """Pairs of passages, [CLS] A [SEP] B [SEP], in which tokens are masked, from sentences in `.bin/.idx` files.

    Fields of a sample of length L = `max_seq_length`: `input_ids` int64 [L], `attention_mask` bool [L] (True for
    tokens), `tokentype_ids` int64 [L] (1 for B and the [SEP] after it); and for the last pipeline stage `ns_labels`
    int64 [] (1 if B does not follow A), `lm_labels` int64 [L] (-1 where nothing is predicted), `loss_mask` bool [L].

    Masks and pairs are random: they depend on the loader's seed, the epoch and the index, and are new in each epoch.

    Args:
        name: name of the dataset for logs; the samples do not depend on it.
        tokenizer: has `get_vocab()` and the ids `cls_token_id`, `sep_token_id`, `mask_token_id`, `pad_token_id`.
        indexed_dataset: the sentences, or None to open the files of `data_prefix`.
        data_prefix: path of the two files without their endings.
        max_num_samples: number of samples; the corpus is repeated until there are enough. None: use the corpus once.
        mask_lm_prob: share of the tokens to predict.
        max_seq_length: tokens of a sample, special ones included; shorter samples are padded.
        short_seq_prob: share of samples whose target length is random and shorter.
        seed: decides which samples are short.
        binary_head: whether a sample is a pair; otherwise it is one passage, as in `RobertaDataset`, and `ns_labels` is
            0.
        masking_style: "bert", or "bert-cn-wwm", which masks whole words of Chinese; see `--do-chinese-wwm`.
        pair_task: how half of the pairs are changed: "order", A and B are swapped (as in LiBai and ALBERT); or "next",
            B is from another document (as in BERT).
        max_ngrams: largest number of consecutive words that are masked together.
        whole_words: whether all tokens of a word are masked together.
        cache_dir: folder for the index; by default `<data_prefix>.cache`; see `record_index.index_folder`.

    Raises:
        ConfigError: An argument is out of range, a file is missing, or no document has two sentences.
        FormatError: A file is broken.
    """

    _special_tokens = 3  # [CLS] and two [SEP]; as in LiBai, also for one passage

    @with_python_numbers
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
        binary_head: bool = True,
        masking_style: str = "bert",
        pair_task: str = "order",
        max_ngrams: int = 3,
        whole_words: bool = True,
        cache_dir: str | Path | None = None,
    ) -> None:
        check_types(BertDataset, locals(), _RULES)
        self.name = name
        self.max_seq_length = max_seq_length
        self.binary_head = binary_head
        self.pair_task = pair_task
        self._cls, self._sep, self._pad = (special_id(tokenizer, role) for role in ("cls", "sep", "pad"))
        masking = Masking(mask_lm_prob, max_ngrams, whole_words, chinese_words=masking_style == "bert-cn-wwm")
        self._masker = Masker(vocabulary_tables(tokenizer), special_id(tokenizer, "mask"), masking)
        room, sentences = max_seq_length - self._special_tokens, 2 if binary_head else 1
        rule = SentenceRule(room, sentences, short_seq_prob, seed, max_num_samples)
        arguments = {"masking": [masking_style, mask_lm_prob, max_ngrams, whole_words], **self._pairs()}
        super().__init__(tokenizer, indexed_dataset, data_prefix, rule, cache_dir, separators=True, **arguments)

    @property
    def repeated_by(self) -> str:
        of_another = self.binary_head and self.pair_task == "next"
        return super().repeated_by or ("pair_task='next'" if of_another else "")

    def _pairs(self) -> dict[str, Any]:
        """The fingerprint's entry about pairs."""
        return {"pairs": self.pair_task if self.binary_head else None}

    def __getitem__(self, index: int) -> Instance:
        random = sample_generator()
        if not self.binary_head:
            return self._sample(self._passage(index), 0, random)
        first, second, label = self._pair(index, random)
        return self._sample([first, second], label, random)

    def _pair(self, index: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
        sizes, tokens, target = self._sentences(index)
        cut = int(sizes[: int(random.integers(1, len(sizes)))].sum())
        first, second, label = tokens[:cut], tokens[cut:], int(random.random() < 0.5)
        if label and self.pair_task == "order":
            first, second = second, first
        elif label:
            second = self._passage_of_another_document(index, random)
        return (*truncate_pair(first, second, target, random), label)

    def _sample(self, passages: Sequence[np.ndarray], label: int, random: np.random.Generator) -> Instance:
        separators = np.cumsum([len(passage) + 1 for passage in passages])
        count = 1 + int(separators[-1])
        tokens = np.full(count, self._sep, np.int64)
        tokens[0] = self._cls
        for passage, end in zip(passages, separators.tolist()):
            tokens[end - len(passage) : end] = passage
        # As in LiBai, also those of the corpus, such as ends of documents.
        special = (tokens == self._cls) | (tokens == self._sep)
        masked, clean, chosen = self._masker.mask(tokens, special, random)
        types = np.zeros(self.max_seq_length, np.int64)
        types[1 + separators[0] : count] = self.binary_head
        attention = np.zeros(self.max_seq_length, bool)
        attention[:count] = True
        labels = np.where(chosen, clean, _NO_LABEL)
        return Instance(
            input_ids=DistTensorData(padded(masked, self.max_seq_length, self._pad)),
            attention_mask=DistTensorData(attention),
            tokentype_ids=DistTensorData(types),
            ns_labels=DistTensorData(np.array(label, np.int64), placement_idx=-1),
            lm_labels=DistTensorData(padded(labels, self.max_seq_length, _NO_LABEL), placement_idx=-1),
            loss_mask=DistTensorData(padded(chosen, self.max_seq_length, False), placement_idx=-1),
        )


def truncate_pair(
    first: np.ndarray, second: np.ndarray, limit: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Cut two passages [n] and [m] to `limit` tokens in all, by removing tokens of the longer one, one by one.

    Each token is removed at the start or end at random. If the lengths are equal, the second passage is cut.
    """
    excess = len(first) + len(second) - limit
    if excess <= 0:
        return first, second
    difference = len(first) - len(second)
    even = max(0, excess - abs(difference))
    from_longer = excess - even
    of_first = even // 2 + (from_longer if difference > 0 else 0)
    of_second = even - even // 2 + (from_longer if difference <= 0 else 0)
    return _cut(first, of_first, random), _cut(second, of_second, random)


def _cut(tokens: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    front = int(random.binomial(count, 0.5))
    return tokens[front : len(tokens) - (count - front)]


class RobertaDataset(BertDataset):
    """Passages, <s> A </s>, in which tokens are masked, from `.bin/.idx` files; the masks change from epoch to epoch.

    Fields and arguments are as in `BertDataset`, without `ns_labels` and the arguments about pairs; `tokentype_ids`
    are 0. The sentences may be whole documents. A sample has as many sentences as fit, with </s> between documents.
    A sentence that is longer than a sample continues in the next sample.

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
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(**given, binary_head=False)

    def __getitem__(self, index: int) -> Instance:
        fields = super().__getitem__(index).get_fields()
        return Instance(**{name: value for name, value in fields.items() if name != "ns_labels"})

    def _pairs(self) -> dict[str, Any]:
        return {}
