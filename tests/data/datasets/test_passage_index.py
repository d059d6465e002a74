"""Passages: every token of the corpus in one sample, and samples as full as sentences allow."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.datasets import BertDataset, RobertaDataset, T5Dataset, passage_index
from libai_data.data.datasets.passage_index import find_passages
from libai_data.data.datasets.sentence_index import SentenceRule
from libai_data.errors import ConfigError
from tests.data.datasets.sentence_corpora import FIRST, Tokenizer, of_sizes, write_corpus

DOCUMENTS = st.lists(st.lists(st.integers(0, 25), max_size=6), min_size=1, max_size=8)
ROOM = 10


def by_loops(documents: list[list[int]], separator: int) -> list[tuple[int, int]]:
    """First token of each sample, and the one behind its last: sentence by sentence, in the words of the docstring."""
    found: list[tuple[int, int]] = []
    start = place = filled = 0
    for document in documents:
        first = True
        for size in (size for size in document if size):
            # The separator belongs to the document's first sentence, and is nothing where a sample begins with it.
            length = size + separator * first
            if filled and filled + length > ROOM and length <= ROOM:
                found.append((start, place))
                start, filled = place, 0
            filled += separator * (first and filled > 0)
            if filled >= ROOM:
                found.append((start, place))
                start, filled = place, 0
            rest = size
            while filled + rest > ROOM:
                place += ROOM - filled
                rest -= ROOM - filled
                found.append((start, place))
                start, filled = place, 0
            place, filled, first = place + rest, filled + rest, False
            if filled == ROOM:
                found.append((start, place))
                start, filled = place, 0
    return [*found, (start, place)] if filled else found


@given(DOCUMENTS, st.booleans())
def test_samples_are_those_of_a_loop_over_sentences(documents: list[list[int]], separators: bool) -> None:
    if not any(map(any, documents)):
        with pytest.raises(ConfigError, match="no token"):
            find_passages(of_sizes(documents), SentenceRule(ROOM, 1), separators)
        return
    found = find_passages(of_sizes(documents), SentenceRule(ROOM, 1), separators)
    assert list(zip(found.start.tolist(), found.stop.tolist())) == by_loops(documents, separators)


@given(DOCUMENTS, st.booleans(), st.sampled_from([1, 7, 30, 1 << 20]), st.sampled_from([0.0, 0.5]))
def test_each_token_is_in_one_sample_and_none_is_too_long(
    documents: list[list[int]], separators: bool, stretch: int, short: float
) -> None:
    if not any(map(any, documents)):
        return
    source = of_sizes(documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passage_index, "_STRETCH", stretch)
        found = find_passages(source, SentenceRule(ROOM, 1, short_seq_prob=short), separators)
    assert found.start.tolist() == [0, *found.stop[:-1].tolist()]
    assert found.stop[-1] == found.used[0] == source.sizes.sum()
    assert (found.stop > found.start).all()
    bounds = source.document_offsets()
    for start, stop, first, last in zip(*(array.tolist() for array in found[:4])):
        inside = set(bounds[first:last].tolist())
        assert inside == {bound for bound in bounds.tolist() if start < bound < stop}
        assert stop - start + separators * len(inside) <= ROOM
    ends = np.cumsum([size for size in source.sizes if size])
    cut = set(found.stop.tolist()) - set(ends.tolist())
    if not short:
        # Only sentences that are longer than a sample (with their separator) are cut.
        for place in cut:
            assert source.sizes[source.sizes > 0][np.searchsorted(ends, place)] > ROOM - separators


def test_whole_documents_are_used_to_the_last_token_and_fill_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(6.5, 1.2, 300).astype(int) + 1, 40_000)
    source = write_corpus(tmp_path / "web", [[random.integers(FIRST, 999, length)] for length in lengths])
    for kind in (RobertaDataset, T5Dataset):
        with caplog.at_level(logging.INFO):
            dataset = kind("x", Tokenizer(), source)
        assert f"an epoch of {len(dataset)} samples uses 100.0 % of the {lengths.sum()} tokens" in caplog.text
        tokens = 0
        for index in range(len(dataset)):
            tokens += sum(map(len, dataset._passage(index)))
        assert tokens == lengths.sum()
        assert tokens / len(dataset) > 0.8 * 510
    caplog.clear()
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="--split-sentences"):
        BertDataset("x", Tokenizer(), source)


def test_pairs_report_what_they_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_corpus(tmp_path / "long", [[[FIRST] * 1000, [FIRST] * 1000]])
    with caplog.at_level(logging.WARNING):
        BertDataset("x", Tokenizer(), source, max_seq_length=103)
    assert "an epoch of 1 samples uses 5.0 % of the 2000 tokens" in caplog.text


@pytest.mark.slow
def test_samples_of_a_long_corpus_are_found_in_seconds() -> None:
    for documents in ([[20] * 300_000], [[6_000_000]], [[2000]] * 3000, [[20] * 3] * 100_000):
        start = time.process_time()
        found = find_passages(of_sizes(documents), SentenceRule(100, 1), True)
        assert time.process_time() - start < 4
        assert found.used[0] == 6_000_000
