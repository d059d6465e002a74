"""Tokens that carry loss are coloured, in the labels and in the tokens themselves."""

from __future__ import annotations

import numpy as np

from libai_data.commands.inspection.cards import COUNTED, tokens_of


def coloured(name: str, sample: dict[str, np.ndarray]) -> list[int]:
    tokens, _ = tokens_of(sample[name], sample, None, 100)
    return [token.id for token in tokens if token.kind == COUNTED]


def test_of_a_conversation_the_same_tokens_are_coloured_in_inputs_and_labels() -> None:
    tokens = np.array([1, 2, 3, 50, 51, 4, 5, 60, 9])
    answers = tokens >= 50
    sample = {"input_ids": tokens[:-1], "labels": tokens[1:], "loss_mask": answers[1:].astype(np.float32)}
    assert coloured("input_ids", sample) == coloured("labels", sample) == [50, 51, 60]


def test_of_packed_documents_no_first_token_is_coloured_for_the_last_label_before_it() -> None:
    sample = {
        "input_ids": np.array([1, 2, 3, 11, 12, 21, 22, 0]),
        "labels": np.array([2, 3, 4, 12, 13, 22, 23, 0]),
        "loss_mask": np.array([0, 1, 1, 1, 1, 1, 1, 0], np.float32),
    }
    assert coloured("input_ids", sample) == [3, 12, 22]
    assert coloured("labels", sample) == [3, 4, 12, 13, 22, 23]


def test_masked_words_are_coloured_where_they_stand() -> None:
    sample = {
        "input_ids": np.array([1, 4, 8, 4, 9, 2]),
        "lm_labels": np.array([-1, 7, -1, 6, 9, -1]),
        "loss_mask": np.array([False, True, False, True, True, False]),
        "attention_mask": np.ones(6, bool),
    }
    assert coloured("input_ids", sample) == [4, 4, 9]
    assert coloured("lm_labels", sample) == [7, 6, 9]
