"""Masking: the choice of an independent implementation, and the papers' numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.datasets.masking import Masker, Masking
from libai_data.data.datasets.vocabulary import vocabulary_tables
from libai_data.errors import ConfigError, SchemaError
from tests.data.datasets.sentence_corpora import FIRST, MASK, Tokenizer

TOKENIZER = Tokenizer(50, 50)
PIECE = FIRST + 50
TOKENS = st.lists(
    st.tuples(st.integers(FIRST, FIRST + 99), st.sampled_from([False] * 6 + [True])), min_size=1, max_size=80
)


def chosen_by_loops(tokens: list[int], special: list[bool], masking: Masking, seed: int) -> set[int]:
    """Whole words and n-grams, one at a time, in lists; from the same draws."""
    whole: list[list[int]] = []
    segment_at: list[int] = []
    segment = 0
    for place, token in enumerate(tokens):
        segment += special[place]
        segment_at.append(segment)
        if special[place]:
            continue
        if masking.whole_words and token >= PIECE and whole and whole[-1][-1] == place - 1:
            whole[-1].append(place)
        else:
            whole.append([place])
    random = np.random.default_rng(seed)
    left = max(1, round(len(tokens) * masking.probability))
    words = [part for word in whole for part in ([word] if len(word) <= left else [[place] for place in word])]
    segment_of = [segment_at[word[0]] for word in words]
    if not words:
        return set()
    order = random.permutation(len(words))
    numbers = random.random(len(words))
    chosen: set[int] = set()
    weights = [1 / n for n in range(1, masking.max_ngrams + 1)]
    for word, number in zip(order, numbers):
        n, total = 1, weights[0] / sum(weights)
        while number >= total and n < masking.max_ngrams:
            total += weights[n] / sum(weights)
            n += 1
        together = [k for k in range(word, min(word + n, len(words))) if segment_of[k] == segment_of[word]]
        while together and sum(len(words[k]) for k in together) > left:
            together.pop()
        places = {place for k in together for place in words[k]}
        if not places & chosen:
            chosen |= places
            left -= len(places)
    return chosen


@given(TOKENS, st.sampled_from([0.05, 0.15, 0.5]), st.integers(1, 4), st.booleans(), st.integers(0, 1000))
def test_the_choice_is_that_of_the_loops(
    tokens: list[tuple[int, bool]], probability: float, ngrams: int, whole: bool, seed: int
) -> None:
    masking = Masking(probability, ngrams, whole)
    masker = Masker(vocabulary_tables(TOKENIZER), MASK, masking)
    ids, special = [token for token, _ in tokens], [is_special for _, is_special in tokens]
    chosen = masker.choose(np.array(ids), np.array(special), np.random.default_rng(seed))
    assert set(np.flatnonzero(chosen).tolist()) == chosen_by_loops(ids, special, masking, seed)
    assert chosen.any() or all(special)


def many(masking: Masking, samples: int = 400, length: int = 512) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, tokens with masks and what is to be predicted, of many samples."""
    masker = Masker(vocabulary_tables(TOKENIZER), MASK, masking)
    random = np.random.default_rng(1)
    tokens = FIRST + random.integers(100, size=(samples, length))
    special = np.zeros(length, bool)
    special[[0, 255, 511]] = True
    found = [masker.mask(row, special, random) for row in tokens]
    assert not any(chosen[special].any() for _, _, chosen in found)
    return tokens, np.array([masked for masked, _, _ in found]), np.array([chosen for _, _, chosen in found])


def test_15_percent_are_predicted_and_of_these_80_percent_masked_10_percent_random_10_percent_kept() -> None:
    tokens, masked, chosen = many(Masking(0.15, 1, whole_words=False))
    assert (chosen.sum(1) == round(512 * 0.15)).all()
    assert (masked[~chosen] == tokens[~chosen]).all()
    count = chosen.sum()
    is_mask = (masked == MASK) & chosen
    kept = (masked == tokens) & chosen
    # Three standard deviations; a random token is the same one now and then.
    for share, expected in ((is_mask.sum() / count, 0.8), (kept.sum() / count, 0.1 + 0.1 / 100)):
        assert abs(share - expected) < 3 * np.sqrt(expected * (1 - expected) / count)
    replaced = masked[chosen & ~is_mask & ~kept]
    assert (replaced >= FIRST).all()
    # Any place and any token is as likely.
    assert abs(chosen[:, 1:255].mean() - chosen[:, 256:511].mean()) < 0.005
    assert np.bincount(replaced - FIRST, minlength=100).min() > 0


def test_ngrams_of_n_words_come_in_proportion_to_1_over_n_and_whole_words_are_never_cut() -> None:
    tokens, _, chosen = many(Masking(0.15, 3, whole_words=True))
    pieces = tokens >= PIECE
    inside = pieces[:, 1:] & ~np.isin(np.arange(511), [0, 254, 255, 510])
    assert (chosen[:, 1:] == chosen[:, :-1])[inside].all()
    assert abs(chosen.sum(1).mean() / 512 - 0.15) < 0.003
    # Few words are masked, so that runs are seldom neighbours: count the words of each run.
    tokens, _, chosen = many(Masking(0.02, 3, whole_words=False), samples=2000)
    ends = np.diff(np.pad(chosen, ((0, 0), (1, 1))).astype(int), axis=1)
    lengths = np.nonzero(ends == -1)[1] - np.nonzero(ends == 1)[1]
    share = np.bincount(np.minimum(lengths, 3), minlength=4)[1:] / len(lengths)
    # The last ones are shortened to fit the number asked for, so there are a few more short ones.
    assert np.abs(share - np.array([6, 3, 2]) / 11).max() < 0.05


def test_chinese_words_are_masked_as_a_whole_and_lose_their_marks() -> None:
    tokenizer = Tokenizer(0, 0, ["你", "好", "##好", "世", "##界"])
    masker = Masker(vocabulary_tables(tokenizer), MASK, Masking(0.4, 1, chinese_words=True))
    ni, hao, inner, shi, jie = range(FIRST, FIRST + 5)
    tokens = np.array([ni, inner, shi, jie] * 5)
    for seed in range(50):
        masked, clean, chosen = masker.mask(tokens, np.zeros(20, bool), np.random.default_rng(seed))
        # Labels and random tokens are characters as running text has them, too.
        assert clean.tolist() == [ni, hao, shi, jie] * 5
        assert hao + 1 not in masked[chosen]
        assert (chosen.reshape(-1, 2)[:, 0] == chosen.reshape(-1, 2)[:, 1]).all()
        # "##界" has no form without the mark in this vocabulary.
        assert (masked[~chosen] == np.array([ni, hao, shi, jie] * 5)[~chosen]).all()
        assert chosen.sum() == 8


def test_byte_level_tokens_make_words_by_the_space_before_them() -> None:
    tokenizer = Tokenizer(0, 0, ["\u0120the", "re", "\u0120a"])
    tables = vocabulary_tables(tokenizer)
    assert tables.continues[FIRST : FIRST + 3].tolist() == [False, True, False]
    assert tables.ordinary.tolist() == [FIRST, FIRST + 1, FIRST + 2]


@pytest.mark.parametrize(
    "tokens", [["\u0120the", "re", "\u010a", "\u0109x"], ["\u2581the", "re", "<0x0A>", "\t"]], ids=["bytes", "pieces"]
)
def test_the_end_of_a_line_begins_a_word_like_a_space(tokens: list[str]) -> None:
    tables = vocabulary_tables(Tokenizer(0, 0, tokens))
    assert tables.continues[FIRST:].tolist() == [False, True, False, False]


def test_wrong_numbers_are_refused() -> None:
    for wrong in ({"probability": 1.0}, {"probability": 0.0}, {"max_ngrams": 0}):
        with pytest.raises(ConfigError):
            Masking(**wrong)


@pytest.mark.parametrize("whole_words", [True, False])
def test_a_token_that_the_tokenizer_does_not_have_is_refused(whole_words: bool) -> None:
    tables = vocabulary_tables(TOKENIZER)
    masker = Masker(tables, MASK, Masking(whole_words=whole_words))
    beyond = len(tables.continues)
    with pytest.raises(SchemaError, match=f"the corpus has the token {beyond}, but the tokenizer has only {beyond}"):
        masker.mask(np.array([FIRST, beyond]), np.zeros(2, bool), np.random.default_rng(0))
