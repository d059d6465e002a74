"""Samples for T5: passages in which sentinels replace spans, and these spans as targets.

Source: C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020),
section 3.1.4 and 3.3.4: 15 % of the tokens, in spans of 3 tokens on average; another sentinel replaces each span.
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from libai_data.data.datasets.masking import padded
from libai_data.data.datasets.sentence_dataset import SentenceDataset
from libai_data.data.datasets.sentence_index import SentenceRule
from libai_data.data.datasets.vocabulary import special_id
from libai_data.data.random.sample_random import sample_generator
from libai_data.data.sources.indexed import IndexedSource
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import check_types, whole, with_python_numbers
from libai_data.structures import DistTensorData, Instance

_NO_LABEL = -1


class T5Dataset(SentenceDataset):
    """Passages in which sentinels replace spans, and the spans as targets, from `.bin/.idx` files.

    Fields, with E = `max_seq_length` and D = `max_seq_length_dec`: `encoder_input_ids` int64 [E], `decoder_input_ids`
    int64 [D], `encoder_attn_mask` bool [E, E], `decoder_attn_mask` bool [D, D] (False for later tokens),
    `encoder_decoder_attn_mask` bool [D, E]; and for the last pipeline stage `lm_labels` int64 [D] (-1 after the end)
    and `loss_mask` bool [D]. A passage has as many sentences as fit, from one document after the other. A longer
    sentence continues in the next sample. Spans are random and new in each epoch.

    Args:
        tokenizer: has `get_vocab()`, `pad_token_id`, `eos_token_id`, `additional_special_tokens_ids` (the sentinels)
            and `bos_token_id`. If `bos_token_id` is None, the padding replaces it, as in T5.
        masked_lm_prob: share of the tokens to predict.
        max_seq_length, max_seq_length_dec: tokens of the encoder and of the decoder.
        mean_span_length: tokens of a span, on average.

    The other arguments are as in `BertDataset`; the sentences may be whole documents.

    Raises:
        ConfigError: An argument is out of range, the sentinels or the decoder's tokens are too few for the spans, a
            file is missing, or there is no document.
        FormatError: A file is broken.
    """

    @with_python_numbers
    def __init__(
        self,
        name: str,
        tokenizer: Any,
        indexed_dataset: IndexedSource | None = None,
        data_prefix: str | Path | None = None,
        max_num_samples: int | None = None,
        masked_lm_prob: float = 0.15,
        max_seq_length: int = 512,
        max_seq_length_dec: int = 128,
        short_seq_prob: float = 0.0,
        seed: int = 1234,
        mean_span_length: float = 3.0,
        cache_dir: str | Path | None = None,
    ) -> None:
        check_types(T5Dataset, locals(), {"max_seq_length_dec": whole(1, 1 << 15)})
        if not 0 < masked_lm_prob < 1 or not 1 <= mean_span_length < inf:
            raise ConfigError(
                f"masked_lm_prob is {masked_lm_prob} and mean_span_length {mean_span_length}; masked_lm_prob must be "
                "between 0 and 1, mean_span_length at least 1"
            )
        self.name = name
        self.max_seq_length, self.max_seq_length_dec = max_seq_length, max_seq_length_dec
        self._probability, self._mean = masked_lm_prob, mean_span_length
        _add_special_tokens(tokenizer)
        self._pad, self._eos = special_id(tokenizer, "pad"), special_id(tokenizer, "eos")
        begin = getattr(tokenizer, "bos_token_id", None)
        self._bos = self._pad if begin is None else int(begin)
        self._sentinels = np.array(tokenizer.additional_special_tokens_ids, np.int64)
        rule = SentenceRule(max_seq_length - 2, 1, short_seq_prob, seed, max_num_samples)
        self._check_room(rule.max_tokens)
        self._history = np.tri(max_seq_length_dec, dtype=bool)
        decides = {"spans": [masked_lm_prob, mean_span_length], "decoder": max_seq_length_dec}
        super().__init__(tokenizer, indexed_dataset, data_prefix, rule, cache_dir, separators=False, **decides)

    def __getitem__(self, index: int) -> Instance:
        random = sample_generator()
        tokens = np.concatenate(self._passage(index))
        spans = draw_spans(len(tokens), self._probability, self._mean, random)
        encoder, targets = corrupt(tokens, spans, self._sentinels)
        decoded = len(targets) + 1
        is_encoded = np.arange(self.max_seq_length) < len(encoder)
        is_decoded = np.arange(self.max_seq_length_dec) < decoded
        decoder = np.full(self.max_seq_length_dec, self._pad, np.int64)
        labels = np.full(self.max_seq_length_dec, _NO_LABEL, np.int64)
        decoder[0], decoder[1:decoded] = self._bos, targets
        labels[: decoded - 1], labels[decoded - 1] = targets, self._eos
        return Instance(
            encoder_input_ids=DistTensorData(padded(encoder, self.max_seq_length, self._pad)),
            decoder_input_ids=DistTensorData(decoder),
            encoder_attn_mask=DistTensorData(is_encoded[:, None] & is_encoded),
            decoder_attn_mask=DistTensorData(is_decoded[:, None] & is_decoded & self._history),
            encoder_decoder_attn_mask=DistTensorData(is_decoded[:, None] & is_encoded),
            lm_labels=DistTensorData(labels, placement_idx=-1),
            loss_mask=DistTensorData(is_decoded, placement_idx=-1),
        )

    def _check_room(self, tokens: int) -> None:
        masked, spans = span_numbers(tokens, self._probability, self._mean)
        if spans > len(self._sentinels):
            raise ConfigError(
                f"{tokens} tokens have {spans} spans, but the tokenizer has only {len(self._sentinels)} sentinels; add "
                f"<extra_id_0> to <extra_id_{spans - 1}> (TokenizerFiles(extra_ids={spans}))"
            )
        if masked + spans + 1 > self.max_seq_length_dec:
            raise ConfigError(
                f"max_seq_length_dec is {self.max_seq_length_dec}, but {tokens} tokens give up to {masked} to predict, "
                f"{spans} sentinels and an end: set it to {masked + spans + 1} or more"
            )


class Spans(NamedTuple):
    """Spans to remove from a passage."""

    starts: np.ndarray  # int64 [spans], first token of each span
    lengths: np.ndarray  # int64 [spans], tokens of each span, at least 1


def span_numbers(tokens: int, probability: float, mean: float) -> tuple[int, int]:
    """The number of tokens to remove from `tokens` tokens, and the number of spans."""
    if tokens < 2:
        return 0, 0
    masked = min(max(round(tokens * probability), 1), tokens - 1)
    return masked, min(max(round(masked / mean), 1), masked, tokens - masked)


def draw_spans(tokens: int, probability: float, mean: float, random: np.random.Generator) -> Spans:
    """Draw the spans to remove from a passage; all divisions into `span_numbers` are equally likely.

    As in T5, removed and kept tokens are divided into as many pieces each, none empty, and a kept piece comes first.
    """
    masked, spans = span_numbers(tokens, probability, mean)
    lengths, between = _pieces(masked, spans, random), _pieces(tokens - masked, spans, random)
    return Spans(np.cumsum(between) + np.cumsum(lengths) - lengths, lengths)


def _pieces(total: int, count: int, random: np.random.Generator) -> np.ndarray:
    """`count` random lengths of at least 1, with the sum `total`."""
    if not count:
        return np.zeros(0, np.int64)
    cuts = np.sort(random.permutation(total - 1)[: count - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def corrupt(tokens: np.ndarray, spans: Spans, sentinels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Replace the spans of a passage, integers [n], by sentinels; between two spans is at least one token.

    Returns:
        int64: the passage with a sentinel for each span; and the spans, each with its sentinel before it.
    """
    starts, lengths = spans
    inside = np.zeros(len(tokens) + 1, np.int8)
    inside[starts] = 1
    inside[starts + lengths] -= 1
    out = np.cumsum(inside[:-1], dtype=np.int8).astype(bool)
    passage = tokens.astype(np.int64)
    passage[starts] = sentinels[: len(starts)]
    targets = np.empty(int(lengths.sum()) + len(starts), np.int64)
    before = np.cumsum(lengths) - lengths + np.arange(len(starts))
    is_token = np.ones(len(targets), bool)
    is_token[before] = False
    targets[before], targets[is_token] = sentinels[: len(starts)], tokens[out]
    out[starts] = False
    return passage[~out], targets


def _add_special_tokens(tokenizer: Any) -> None:
    """Add the tokens for begin and end and the sentinels to one of LiBai's tokenizers, as LiBai's T5Dataset does."""
    if hasattr(tokenizer, "add_tokens"):
        known = [tokenizer.bos_token, tokenizer.eos_token, *(tokenizer.additional_special_tokens or ())]
        tokenizer.add_tokens([token for token in known if token])
