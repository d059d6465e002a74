"""Masked samples of text in many scripts, by every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import numpy as np
import pytest

from libai_data.data.datasets import BertDataset, RobertaDataset, T5Dataset
from libai_data.data.datasets.vocabulary import vocabulary_tables
from libai_data.data.sources.indexed import IndexedSource
from libai_data.data.text.tokenizer import TextTokenizer, TokenizerFiles
from libai_data.data.text.tokenizer_training import Training, train_tokenizer
from tests.data.datasets.sentence_corpora import read, write_corpus
from tests.data.text.corpora import write_json_lines
from tests.data.text.scripts import SCRIPTS, WITHOUT_SPACES, sentences
from tests.properties import is_long_run, slowly

pytest.importorskip("tokenizers")

KINDS = ("bytes", "bytes of latin", "wordpiece", "sentencepiece")
ROLES = ("pad", "cls", "sep", "mask", "bos", "eos")
SENTINELS = 32
SHORT_RUN = ("latin", "devanagari", "chinese", "thai")
MASKED_SCRIPTS = [script if script in SHORT_RUN else slowly(script) for script in SCRIPTS]


class WithRoles:
    """A tokenizer with special tokens for each role, behind all others."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.encode_batch = tokenizer.encode_batch
        self._vocabulary = dict(tokenizer.get_vocab())
        for number, role in enumerate(ROLES):
            self._vocabulary[f"[{role.upper()}]"] = len(tokenizer) + number
            setattr(self, f"{role}_token_id", len(tokenizer) + number)
        self.eos_token_id: int = self._vocabulary["[EOS]"]
        first = len(tokenizer) + len(ROLES)
        self.additional_special_tokens_ids = list(range(first, first + SENTINELS))
        self._vocabulary.update((f"<extra_id_{number}>", first + number) for number in range(SENTINELS))

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WithRoles]:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("tokenizers")
    corpus = [text for script in SCRIPTS for text in sentences(script, 60)]
    every = write_json_lines(folder / "every.jsonl", corpus)
    latin = write_json_lines(folder / "latin.jsonl", sentences("latin", 100))
    train_tokenizer([str(every)], str(folder / "bytes.json"), Training(vocab_size=2000))
    train_tokenizer([str(latin)], str(folder / "latin.json"), Training(vocab_size=500))
    train_tokenizer([str(every)], str(folder / "wordpiece.json"), Training("wordpiece", vocab_size=2000))
    (folder / "text").write_text("\n".join(corpus), "utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "pieces"), vocab_size=2000, model_type="bpe",
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    names = ("bytes.json", "latin.json", "wordpiece.json", "pieces.model")
    return {kind: WithRoles(TokenizerFiles(str(folder / name)).load()) for kind, name in zip(KINDS, names)}


def samples_of(
    make: Callable[[IndexedSource], Any], tokenizer: WithRoles, prefix: Path, script: str
) -> Iterator[dict[str, np.ndarray]]:
    """Samples of a corpus in a script, of epoch after epoch."""
    tokens = tokenizer.encode_batch(sentences(script, 400, seed=1))
    dataset = make(write_corpus(prefix, [tokens[first : first + 20] for first in range(0, len(tokens), 20)]))
    for number in range(500 if is_long_run() else 60):
        epoch, index = divmod(number, len(dataset))
        yield read(dataset, index, epoch, seed=7)


@pytest.mark.parametrize("dataset_kind", [RobertaDataset, slowly(BertDataset)])
@pytest.mark.parametrize("script", MASKED_SCRIPTS)
def test_15_percent_are_masked_in_every_script_and_no_loss_mask_is_empty(
    trained: dict[str, WithRoles], tmp_path: Path, script: str, dataset_kind: Any
) -> None:
    for kind, tokenizer in trained.items():
        make = partial(dataset_kind, "x", tokenizer, max_seq_length=256)
        count = masked = 0
        for sample in samples_of(make, tokenizer, tmp_path / kind, script):
            assert sample["loss_mask"].any(), kind
            count += int(sample["attention_mask"].sum())
            masked += int(sample["loss_mask"].sum())
        # Words are masked whole, so that what is left of a quota may be too small for any of them.
        assert abs(masked / count - 0.15) < 0.007, kind


@pytest.mark.parametrize("script", MASKED_SCRIPTS)
def test_t5s_spans_are_those_of_the_paper_in_every_script(
    trained: dict[str, WithRoles], tmp_path: Path, script: str
) -> None:
    for kind, tokenizer in trained.items():
        make = partial(T5Dataset, "x", tokenizer, max_seq_length=256, max_seq_length_dec=96)
        sentinels = tokenizer.additional_special_tokens_ids
        count = masked = spans = 0
        for sample in samples_of(make, tokenizer, tmp_path / kind, script):
            labels = sample["lm_labels"][sample["loss_mask"].astype(bool)]
            encoder = sample["encoder_input_ids"][sample["encoder_attn_mask"][0].astype(bool)]
            used = labels[np.isin(labels, sentinels)].tolist()
            # Both sides name the same spans, from the first sentinel on, and the decoder ends.
            assert used == encoder[np.isin(encoder, sentinels)].tolist() == sentinels[: len(used)]
            assert labels[0] == sentinels[0] and labels[-1] == tokenizer.eos_token_id
            taken = len(labels) - 1 - len(used)
            masked, spans, count = masked + taken, spans + len(used), count + len(encoder) - len(used) + taken
        assert abs(masked / count - 0.15) < 0.004, kind
        assert abs(masked / spans - 3) < 0.1, kind


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_whole_where_there_are_spaces_and_characters_elsewhere(
    trained: dict[str, WithRoles], script: str
) -> None:
    text = sentences(script, 1, seed=2)[0]
    words = text.split()
    for kind in ("bytes", "sentencepiece", "wordpiece"):
        tokenizer = trained[kind]
        tokens = np.array(tokenizer.encode_batch([text])[0])
        # The first token always begins a word.
        begins = 1 + int((~vocabulary_tables(tokenizer).continues[tokens[1:]]).sum())
        if script not in WITHOUT_SPACES:
            # WordPiece counts the mark at the end as a word.
            assert len(words) <= begins <= len(words) + (kind == "wordpiece"), kind
        else:
            # Tokens of one or more characters each begin a word; marks, and characters that combine, do not.
            assert begins > max(0.5 * len(tokens), len(words)), kind


def test_a_character_in_several_tokens_is_one_word() -> None:
    tokens = ["\u0120a", "b", "\u00e4\u00bd", "\u0142", "\u00e5", "\u00a5\u00bd", "\u00e0\u00b8\u00b1", "\u00ef"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tables = vocabulary_tables(SimpleNamespace(get_vocab=lambda: vocabulary))
    # "you" in two tokens, "good" in two, a Thai vowel that combines, and a byte that may begin anything.
    assert tables.continues.tolist() == [False, True, False, True, False, True, True, True]
