"""BERT's and RoBERTa's samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data import CyclicSampler
from libai_data.data.datasets import BertDataset, RobertaDataset
from libai_data.data.datasets.bert import truncate_pair
from libai_data.errors import ConfigError
from tests.data.datasets.sentence_corpora import CLS, FIRST, PAD, SEP, Tokenizer, random_corpus, read, write_corpus
from tests.loader.streams import stream


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return random_corpus(tmp_path_factory.mktemp("corpus") / "sentences", 300)


def original(sample: dict[str, np.ndarray]) -> np.ndarray:
    """The tokens before they were masked."""
    return np.where(sample["loss_mask"], sample["lm_labels"], sample["input_ids"])[sample["attention_mask"]]


def passages(sample: dict[str, np.ndarray]) -> tuple[list[int], list[int]]:
    """A and B of a sample, checked for what must lie around them."""
    tokens, count = original(sample), int(sample["attention_mask"].sum())
    types = sample["tokentype_ids"]
    assert tokens[0] == CLS
    assert tokens[-1] == SEP
    second = int(np.argmax(types)) if types.any() else count
    assert tokens[second - 1] == SEP
    assert (types[second:count] == 1).all()
    assert not types[:second].any()
    assert not types[count:].any()
    assert (sample["input_ids"][count:] == PAD).all()
    assert (sample["lm_labels"][~sample["loss_mask"]] == -1).all()
    assert sample["attention_mask"][:count].all()
    return tokens[1 : second - 1].tolist(), tokens[second : count - 1].tolist()


@pytest.mark.parametrize("pair_task", ["order", "next"])
def test_half_of_the_pairs_follow_each_other_and_the_label_says_which(corpus: Any, pair_task: str) -> None:
    dataset = BertDataset("bert", Tokenizer(), corpus, max_seq_length=4096, pair_task=pair_task)
    labels = []
    stream = corpus.tokens.tolist()
    text = "".join(map(chr, stream))
    for index in range(len(dataset)):
        sample = read(dataset, index)
        first, second = passages(sample)
        labels.append(int(sample["ns_labels"]))
        document = "".join(map(chr, corpus.document(index).tolist()))
        a, b = "".join(map(chr, first)), "".join(map(chr, second))
        assert b in text
        if not labels[-1]:
            assert a + b == document
        elif pair_task == "order":
            assert b + a == document
        else:
            assert document.startswith(a)
            assert b not in document
    assert abs(np.mean(labels) - 0.5) < 3 * 0.5 / np.sqrt(len(labels))


@pytest.mark.parametrize("kind", [BertDataset, RobertaDataset])
def test_separators_of_the_corpus_are_not_predicted(tmp_path: Path, kind: Any) -> None:
    # As `--append-eod` writes them with BERT's vocabulary.
    source = write_corpus(tmp_path / "with_ends", [[[FIRST] * 5, [FIRST] * 5 + [SEP]]] * 20)
    dataset = kind("x", Tokenizer(), source, max_seq_length=16, mask_lm_prob=0.5)
    for index in range(len(dataset)):
        labels = read(dataset, index)["lm_labels"]
        assert set(labels[labels >= 0].tolist()) == {FIRST}


def truncated_by_loop(first: list[int], second: list[int], limit: int) -> tuple[int, int]:
    """BERT's loop: one token of the longer passage at a time."""
    a, b = len(first), len(second)
    while a + b > limit:
        if a > b:
            a -= 1
        else:
            b -= 1
    return a, b


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 60), st.integers(0, 99))
def test_passages_are_cut_as_by_berts_loop(first: int, second: int, limit: int, seed: int) -> None:
    a, b = np.arange(first), 100 + np.arange(second)
    cut_a, cut_b = truncate_pair(a, b, limit, np.random.default_rng(seed))
    assert (len(cut_a), len(cut_b)) == truncated_by_loop(a.tolist(), b.tolist(), limit)
    for cut in (cut_a, cut_b):
        assert (np.diff(cut) == 1).all()


def test_both_ends_are_cut_alike() -> None:
    random = np.random.default_rng(0)
    fronts = [int(truncate_pair(np.arange(100), np.arange(0), 60, random)[0][0]) for _ in range(2000)]
    assert abs(np.mean(fronts) - 20) < 0.3
    assert abs(np.var(fronts) - 10) < 1.5


@pytest.mark.parametrize("length", [32, 512])
def test_robertas_samples_hold_the_corpus_token_for_token_with_separators_between_documents(
    corpus: Any, length: int
) -> None:
    dataset = RobertaDataset("roberta", Tokenizer(), corpus, max_seq_length=length)
    found = [original(read(dataset, index)) for index in range(len(dataset))]
    assert all(tokens[0] == CLS and tokens[-1] == SEP for tokens in found)
    inner = np.concatenate([tokens[1:-1] for tokens in found])
    assert inner[inner != SEP].tolist() == corpus.tokens.tolist()
    # A separator stands where a document ends within a sample, and nowhere else.
    ends = set(corpus.document_offsets().tolist())
    sample_ends = set(np.cumsum([(tokens[1:-1] != SEP).sum() for tokens in found]).tolist())
    before = np.cumsum(inner != SEP)[inner == SEP]
    assert set(before.tolist()) == ends - sample_ends - {0}
    # The last samples alone are short of a sentence, of 60 tokens at most.
    assert np.mean([len(tokens) for tokens in found]) > (0.6 if length == 32 else 0.9) * length


def test_documents_without_a_token_make_no_sample(tmp_path: Path) -> None:
    documents: list[list[list[int]]] = [
        [[]],
        [[], [FIRST] * 4, [], [FIRST + 1] * 4, []],
        [],
        [[]],
        [[FIRST + 2] * 3, []],
    ]
    source = write_corpus(tmp_path / "gaps", documents)
    for dataset in (
        RobertaDataset("x", Tokenizer(), source, max_seq_length=8),
        BertDataset("x", Tokenizer(), source, max_seq_length=11),
        BertDataset("x", Tokenizer(), source, max_seq_length=11, pair_task="next"),
    ):
        for epoch in range(20):
            for index in range(len(dataset)):
                assert read(dataset, index, epoch)["loss_mask"].any()


def test_masks_change_with_the_epoch_and_with_nothing_else(corpus: Any) -> None:
    dataset = BertDataset("bert", Tokenizer(), corpus, max_seq_length=64)
    first, again, other = (read(dataset, 7, epoch) for epoch in (0, 0, 1))
    assert all((first[name] == again[name]).all() for name in first)
    assert (first["input_ids"] != other["input_ids"]).any()
    alone, by_workers = (
        stream(dataset, CyclicSampler(dataset, 16, shuffle=True, seed=3), 1, num_workers=workers) for workers in (0, 2)
    )
    assert by_workers == alone


def test_layouts_are_libais(corpus: Any) -> None:
    sample = BertDataset("bert", Tokenizer(), corpus, max_seq_length=32)[0].get_fields()
    assert [(name, value.placement_idx, value.tensor.dtype.name) for name, value in sample.items()] == [
        ("input_ids", 0, "int64"),
        ("attention_mask", 0, "bool"),
        ("tokentype_ids", 0, "int64"),
        ("ns_labels", -1, "int64"),
        ("lm_labels", -1, "int64"),
        ("loss_mask", -1, "bool"),
    ]
    assert sample["ns_labels"].tensor.shape == ()


def test_documents_of_one_sentence_make_no_pairs_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "documents", [[[FIRST] * 10]] * 3)
    with pytest.raises(ConfigError, match="--split-sentences"):
        BertDataset("bert", Tokenizer(), source)
    dataset = BertDataset("bert", Tokenizer(), data_prefix=tmp_path / "documents", binary_head=False, max_seq_length=16)
    # 13 tokens a sample, of documents of 10.
    assert len(dataset) == 3
    assert passages(read(dataset, 0)) == ([FIRST] * 10, [])
    with pytest.raises(ConfigError, match="data_prefix"):
        BertDataset("bert", Tokenizer())
    with pytest.raises(IndexError, match="index 3"):
        dataset[3]


def test_a_corpus_of_one_document_gives_next_pairs_too(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "one", [[[FIRST + n] * 5 for n in range(4)], []])
    dataset = BertDataset("bert", Tokenizer(), source, pair_task="next", max_seq_length=64)
    for epoch in range(20):
        passages(read(dataset, 0, epoch))


def test_passages_of_other_documents_have_tokens(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "gaps", [[[FIRST]] * 2, [[], []], [[], [FIRST + 1], []]])
    dataset = BertDataset("bert", Tokenizer(), source, pair_task="next", max_seq_length=64, mask_lm_prob=0.01)
    seen = [passages(read(dataset, 0, epoch))[1] for epoch in range(40)]
    assert {tuple(second) for second in seen} == {(FIRST,), (FIRST + 1,)}


def test_wrong_arguments_are_refused_by_name(corpus: Any) -> None:
    class Bare(Tokenizer):
        mask_token_id = None  # type: ignore[assignment]

    for arguments, words in (
        ({"masking_style": "t5"}, "masking_style"),
        ({"pair_task": "nsp"}, "pair_task"),
        ({"mask_lm_prob": 1}, "mask_lm_prob is 1"),
        ({"tokenizer": Bare()}, "no mask token"),
    ):
        with pytest.raises(ConfigError, match=words):
            BertDataset(**{"name": "x", "tokenizer": Tokenizer(), "indexed_dataset": corpus, **arguments})


def test_the_fingerprint_tells_what_decides_the_samples(corpus: Any) -> None:
    def of(**arguments: Any) -> Any:
        return BertDataset(
            **{"name": "x", "tokenizer": Tokenizer(), "indexed_dataset": corpus, **arguments}
        ).fingerprint()

    assert of() == of(name="y")
    for change in ({"seed": 2}, {"mask_lm_prob": 0.2}, {"tokenizer": Tokenizer(999)}, {"pair_task": "next"}):
        assert of(**change) != of()
