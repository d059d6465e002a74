"""T5's samples: spans by the paper's numbers, and nothing lost between encoder and decoder."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.datasets import T5Dataset
from libai_data.data.datasets.t5 import corrupt, draw_spans, span_numbers
from libai_data.errors import ConfigError
from tests.data.datasets.sentence_corpora import BOS, EOS, FIRST, PAD, Tokenizer, random_corpus, read, write_corpus

SENTINELS = np.arange(7, FIRST)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return random_corpus(tmp_path_factory.mktemp("corpus") / "sentences", 200)


def corrupted_by_loops(tokens: list[int], starts: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
    encoder, decoder, number, place = [], [], 0, 0
    while place < len(tokens):
        if place in starts:
            length = lengths[starts.index(place)]
            encoder.append(7 + number)
            decoder.extend([7 + number, *tokens[place : place + length]])
            number += 1
            place += length
        else:
            encoder.append(tokens[place])
            place += 1
    return encoder, decoder


@given(st.integers(0, 120), st.sampled_from([0.05, 0.15, 0.5, 0.9]), st.sampled_from([1, 3, 10]), st.integers(0, 99))
def test_spans_are_taken_out_as_by_loops(count: int, probability: float, mean: float, seed: int) -> None:
    tokens = np.arange(FIRST, FIRST + count).astype(np.uint16)
    spans = draw_spans(count, probability, mean, np.random.default_rng(seed))
    masked, number = span_numbers(count, probability, mean)
    assert (int(spans.lengths.sum()), len(spans.lengths)) == (masked, number)
    if number:
        # Each span, and what stays before it, has a token at least, and the last one ends with the passage.
        assert (spans.lengths >= 1).all()
        assert (spans.starts - np.append(0, spans.starts[:-1] + spans.lengths[:-1]) >= 1).all()
        assert spans.starts[-1] + spans.lengths[-1] == count
    encoder, spoken = corrupt(tokens, spans, SENTINELS)
    expected = corrupted_by_loops(tokens.tolist(), spans.starts.tolist(), spans.lengths.tolist())
    assert (encoder.tolist(), spoken.tolist()) == expected


def test_every_way_to_divide_is_as_likely() -> None:
    random = np.random.default_rng(0)
    found: Counter[tuple[int, ...]] = Counter()
    for _ in range(6000):
        spans = draw_spans(12, 0.5, 2, random)
        found[tuple(spans.lengths.tolist() + spans.starts.tolist())] += 1
    # 6 tokens in 3 spans, and 6 between them: 2 cuts of 5 places each.
    ways = len(list(combinations(range(5), 2))) ** 2
    assert len(found) == ways
    expected = 6000 / ways
    assert sum((count - expected) ** 2 / expected for count in found.values()) < ways + 4 * np.sqrt(2 * ways)


def test_encoder_and_decoder_together_hold_the_corpus_token_for_token(corpus: Any) -> None:
    dataset = T5Dataset("t5", Tokenizer(), corpus, max_seq_length=1500, max_seq_length_dec=400)
    found: list[int] = []
    for index in range(len(dataset)):
        sample = read(dataset, index)
        labels = sample["lm_labels"][sample["loss_mask"]].tolist()
        decoder = sample["decoder_input_ids"]
        assert decoder[0] == BOS
        assert decoder[1 : len(labels)].tolist() == labels[:-1]
        assert (decoder[len(labels) :] == PAD).all()
        spoken: dict[int, list[int]] = {}
        for token in labels[:-1]:
            if token < FIRST:
                spoken[token] = []
            else:
                spoken[list(spoken)[-1]].append(token)
        for token in sample["encoder_input_ids"][sample["encoder_attn_mask"][0]].tolist():
            found.extend(spoken.pop(token) if token < FIRST else [token])
        assert not spoken
    assert found == corpus.tokens.tolist()


def test_masks_show_the_tokens_and_the_decoder_no_later_ones(corpus: Any) -> None:
    sample = read(T5Dataset("t5", Tokenizer(), corpus), 0)
    encoder = int(sample["encoder_attn_mask"][0].sum())
    decoder = int(sample["loss_mask"].sum())
    sees = np.arange(512) < encoder
    speaks = np.arange(128) < decoder
    assert (sample["encoder_attn_mask"] == sees[:, None] & sees).all()
    assert (sample["encoder_decoder_attn_mask"] == speaks[:, None] & sees).all()
    later = np.arange(128) > np.arange(128)[:, None]
    assert (sample["decoder_attn_mask"] == speaks[:, None] & speaks & ~later).all()


def test_passages_of_one_token_have_no_span(tmp_path: Path) -> None:
    dataset = T5Dataset("t5", Tokenizer(), write_corpus(tmp_path / "tiny", [[[FIRST]]]), max_seq_length=8)
    sample = read(dataset, 0)
    assert sample["encoder_input_ids"].tolist() == [FIRST] + [PAD] * 7
    assert sample["lm_labels"][sample["loss_mask"]].tolist() == [EOS]


def test_too_few_sentinels_and_too_short_a_decoder_are_refused_with_the_numbers(corpus: Any) -> None:
    few = Tokenizer()
    few.additional_special_tokens_ids = list(range(7, 17))
    # 510 tokens: round(76.5) = 76 in round(25.3) = 25 spans.
    with pytest.raises(ConfigError, match=r"25 spans, but the tokenizer has only 10 sentinels.*extra_ids=25"):
        T5Dataset("t5", few, corpus)
    with pytest.raises(ConfigError, match="set it to 102 or more"):
        T5Dataset("t5", Tokenizer(), corpus, max_seq_length_dec=101)
    assert len(T5Dataset("t5", Tokenizer(), corpus, max_seq_length_dec=102))
