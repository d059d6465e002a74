"""The sample index: the runs of sentences that LiBai's loops find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.datasets import BertDataset, RobertaDataset
from libai_data.data.datasets.sentence_index import SentenceRule, SentenceSamples, find_samples
from libai_data.errors import ConfigError
from tests.data.datasets.sentence_corpora import Tokenizer, of_sizes, random_corpus

DOCUMENTS = st.lists(st.lists(st.integers(0, 12), max_size=9), min_size=1, max_size=12)


def by_loops(documents: list[list[int]], targets: dict[int, int], least: int, epochs: int) -> list[tuple[int, int]]:
    """Megatron-LM's `build_mapping`, written from its description: a sample ends where it is long enough, has enough
    sentences, and leaves more than one behind; or with its document."""
    found = []
    for _ in range(epochs):
        behind = 0
        for document in ([size for size in document if size] for document in documents):
            first, behind = behind, behind + len(document)
            if len(document) < least:
                continue
            begin, length = first, 0
            for sentence in range(first, behind):
                length += document[sentence - first]
                remaining = behind - sentence - 1
                enough = length >= targets.get(begin, 10) and sentence + 1 - begin >= least and remaining > 1
                if enough or not remaining:
                    found.append((begin, sentence + 1))
                    begin, length = sentence + 1, 0
    return found


def numbers_of(found: SentenceSamples, documents: list[list[int]]) -> list[tuple[int, int]]:
    """First sentence of each sample and the one behind its last, counted without sentences that have no token."""
    before = np.cumsum([0, *(size > 0 for document in documents for size in document)])
    return list(zip(before[found.first].tolist(), before[found.stop].tolist()))


@given(DOCUMENTS, st.sampled_from([1, 2]), st.sampled_from([None, 7, 40]))
def test_samples_are_those_of_the_loops(documents: list[list[int]], least: int, wanted: int | None) -> None:
    one = by_loops(documents, {}, least, 1)
    if not one:
        with pytest.raises(ConfigError, match="none of the"):
            find_samples(of_sizes(documents), SentenceRule(10, least))
        return
    found = find_samples(of_sizes(documents), SentenceRule(10, least, max_num_samples=wanted))
    expected = (one * 40)[:wanted] if wanted else one
    assert numbers_of(found, documents) == expected
    places = np.cumsum([0, *of_sizes(documents).sizes])
    assert (found.start == places[found.first]).all()
    assert (found.target == 10).all()


@given(DOCUMENTS, st.integers(0, 100))
def test_short_samples_are_those_of_the_loops_too(documents: list[list[int]], seed: int) -> None:
    if not by_loops(documents, {}, 1, 1):
        return
    found = find_samples(of_sizes(documents), SentenceRule(10, 1, short_seq_prob=0.5, seed=seed))
    numbers = numbers_of(found, documents)
    targets = dict(zip([first for first, _ in numbers], found.target.tolist()))
    assert numbers == by_loops(documents, targets, 1, 1)


def test_short_samples_are_as_many_and_as_long_as_asked_and_others_in_each_epoch() -> None:
    source = of_sizes([[8] * 100_000])
    found = find_samples(source, SentenceRule(8, 1, short_seq_prob=0.1, max_num_samples=200_000))
    targets = found.target.reshape(2, -1)
    short = targets < 8
    # A tenth aims at 2 to 8, each as often.
    assert abs(short.mean() - 0.1 * 6 / 7) < 0.002
    counts = np.bincount(targets[short], minlength=8)[2:]
    assert (np.abs(counts / counts.sum() - 1 / 6) < 0.01).all()
    assert (targets[0] != targets[1]).any()


def test_which_samples_are_short_stays_the_same_in_all_versions() -> None:
    # Whoever changes this answer raises _VERSION: saved states would continue with other samples.
    found = find_samples(of_sizes([[8] * 9]), SentenceRule(8, 1, short_seq_prob=0.5, max_num_samples=18, seed=7))
    assert found.target.tolist() == [8, 4, 8, 8, 8, 8, 8, 8, 5, 6, 8, 8, 8, 7, 7, 4, 3, 8]


def test_a_long_document_and_many_short_ones_take_no_loop_over_samples() -> None:
    import time

    for documents in ([[20] * 300_000], [[20] * 3] * 100_000):
        start = time.process_time()
        found = find_samples(of_sizes(documents), SentenceRule(100, 1))
        assert time.process_time() - start < 2
        assert (np.add.reduceat(of_sizes(documents).sizes, found.first).sum()) == 6_000_000


@pytest.mark.parametrize("kind", [BertDataset, RobertaDataset])
def test_the_index_is_kept_and_another_rule_has_another_file(tmp_path: Path, kind: Any) -> None:
    source = random_corpus(tmp_path / "corpus", 20)
    first = kind("x", Tokenizer(), source, short_seq_prob=0.1)
    (kept,) = (tmp_path / "corpus.cache").glob("*.npy")
    before = kept.stat().st_mtime_ns
    again = kind("x", Tokenizer(), source, short_seq_prob=0.1)
    assert all((ours == theirs).all() for ours, theirs in zip(first._samples, again._samples))
    assert kept.stat().st_mtime_ns == before
    kind("x", Tokenizer(), source, short_seq_prob=0.1, seed=2)
    assert len(list((tmp_path / "corpus.cache").glob("*.npy"))) == 2


@pytest.mark.parametrize("wrong", [{"max_tokens": 1}, {"short_seq_prob": 1.5}, {"max_num_samples": 0}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(wrong.values())))):
        SentenceRule(**{"max_tokens": 10, "min_sentences": 1, **wrong})  # type: ignore[arg-type]
