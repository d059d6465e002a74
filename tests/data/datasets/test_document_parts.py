"""Training, validation and test: no part holds a document of another, however often documents are repeated."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data import build_nlp_train_val_test_loader
from libai_data.data.datasets import BertDataset, ConcatDataset, GPTDataset, Map, RobertaDataset, T5Dataset
from libai_data.data.datasets.combine import random_split
from libai_data.data.sources.indexed import IndexedSource
from libai_data.delivery.build import cut
from libai_data.errors import ConfigError
from tests.data.datasets.sentence_corpora import FIRST, Tokenizer, read, write_corpus

DOCUMENTS = 300
SENTENCES = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedSource:
    """Documents of sentences of 10 to 20 tokens; each document has a token of its own."""
    random = np.random.default_rng(0)
    documents = [[[FIRST + number] * random.integers(10, 21) for _ in range(SENTENCES)] for number in range(DOCUMENTS)]
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", documents)


def same(sample: Any) -> Any:
    return sample


class MappedAlike(Map):
    """Has other arguments than its base."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, same)


TOKENIZER = Tokenizer(DOCUMENTS, 0)
DATASETS: dict[str, Callable[[IndexedSource], Any]] = {
    "gpt": lambda source: GPTDataset(source, 64, num_epochs=2),
    "gpt, shuffled": lambda source: GPTDataset(source, 64, num_epochs=3, shuffle_documents=True, eod_mask_loss=True),
    "gpt, packed": lambda source: GPTDataset(source, 100, num_epochs=2, packing=True),
    "mapped gpt": lambda source: Map(GPTDataset(source, 64, num_epochs=2), same),
    "mapped by a subclass": lambda source: MappedAlike(GPTDataset(source, 64, num_epochs=2)),
    "bert": lambda source: BertDataset("x", TOKENIZER, source, max_num_samples=900, pair_task="next"),
    "roberta": lambda source: RobertaDataset("x", TOKENIZER, source, max_num_samples=900, max_seq_length=32),
    "t5": lambda source: T5Dataset("x", TOKENIZER, source, max_num_samples=900),
}


def documents_of(dataset: Any) -> set[int]:
    """The documents of which a dataset has tokens, but for those that masks drew."""
    found: set[int] = set()
    for index in range(len(dataset)):
        sample = read(dataset, index)
        if "encoder_input_ids" in sample:
            tokens = np.concatenate([sample["encoder_input_ids"], sample["lm_labels"]])
        elif "lm_labels" in sample:
            tokens = np.where(sample["loss_mask"], sample["lm_labels"], sample["input_ids"])
        else:
            tokens = np.concatenate([sample["input_ids"], sample["labels"]])
        found |= set((tokens[tokens >= FIRST] - FIRST).tolist())
    return found


@pytest.mark.parametrize("kind", DATASETS)
def test_no_document_is_in_two_parts_though_documents_are_repeated(corpus: IndexedSource, kind: str) -> None:
    parts = cut(DATASETS[kind](corpus), [8, 1, 1])
    sets = [documents_of(part) for part in parts]
    assert not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2])
    assert len(sets[0] | sets[1] | sets[2]) == DOCUMENTS
    samples = [len(part) for part in parts]
    assert np.abs(np.array(samples) / sum(samples) - [0.8, 0.1, 0.1]).max() < 0.01


def test_loaders_of_the_three_parts_share_no_document(corpus: IndexedSource) -> None:
    loaders: Any = build_nlp_train_val_test_loader(
        DATASETS["gpt"](corpus), [[3, 1, 0]], None, None, train_batch_size=4, test_batch_size=4, num_workers=0
    )
    assert loaders[2] is None
    train, validation = (documents_of(loader.dataset) for loader in loaders[:2])
    assert train and validation and not train & validation


@given(
    st.lists(st.integers(0, 9), max_size=12),
    st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
)
def test_parts_of_a_source_are_its_documents_in_order(
    tmp_path_factory: Any, sizes: list[int], shares: list[int]
) -> None:
    ends = np.cumsum([0, *sizes])
    documents = [[list(range(start, stop))] for start, stop in zip(ends, ends[1:])]
    source = write_corpus(tmp_path_factory.mktemp("parts") / "x", documents)
    parts = source.split(shares)
    assert [part.document(n).tolist() for part in parts for n in range(part.num_documents)] == [
        document[0] for document in documents
    ]
    for part, share in zip(parts, shares):
        assert part.tokens.tolist() == [token for n in range(len(part)) for token in part[n].tolist()]
        assert part.document_offsets().tolist() == np.cumsum([0, *part.sizes]).tolist()
        wanted = sum(sizes) * share / sum(shares)
        assert share or not len(part.tokens)
        assert abs(len(part.tokens) - wanted) <= max(sizes, default=0)


def test_a_part_is_the_same_after_it_was_pickled_and_parts_can_be_divided_again(corpus: IndexedSource) -> None:
    import pickle

    part = corpus.split([1, 1])[1].split([1, 2])[1]
    again = pickle.loads(pickle.dumps(part))
    assert (again.tokens == part.tokens).all()
    assert again.fingerprint == part.fingerprint != corpus.fingerprint
    assert set((part.tokens - FIRST).tolist()) == set(range(DOCUMENTS - part.num_documents, DOCUMENTS))


def test_repeated_documents_within_other_datasets_are_refused(corpus: IndexedSource) -> None:
    repeated = DATASETS["gpt"](corpus)
    once = GPTDataset(corpus, 64)
    with pytest.raises(ConfigError, match="num_epochs=2"):
        cut(ConcatDataset([once, repeated]), [1, 1])
    with pytest.raises(ConfigError, match="max_num_samples=900"):
        random_split(DATASETS["t5"](corpus), [1, 1])
    pairs = BertDataset("x", TOKENIZER, corpus, pair_task="next")
    for split in (lambda: random_split(pairs, [1, 1]), lambda: cut(ConcatDataset([pairs]), [1, 1])):
        with pytest.raises(ConfigError, match="pair_task='next'"):
            split()
    assert sum(map(len, random_split(once, [1, 1]))) == len(once)
