"""`libai-data corpus`: counts that are those of the documents, in words and as a picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.commands import main
from libai_data.commands.corpus import examine
from libai_data.data.sources.indexed import IndexedSource
from libai_data.data.text.preprocessing import preprocess
from libai_data.data.text.shards import Task
from libai_data.data.text.tokenizer import TokenizerFiles
from tests.data.datasets.sentence_corpora import write_corpus
from tests.data.text.corpora import bpe_tokenizer, texts, write_json_lines


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=30))
def test_lengths_and_duplicates_are_those_of_the_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    source = write_corpus(tmp_path_factory.mktemp("corpus") / "x", [[document] for document in documents])
    found = examine(source)
    assert found.lengths.tolist() == list(map(len, documents))
    full = [tuple(document) for document in documents if document]
    assert found.duplicates == len(full) - len(set(full))
    assert found.duplicate_tokens == sum(map(len, full)) - sum(map(len, set(full)))
    rows = found.histogram()
    assert sum(documents for _, documents, _ in rows) == len(documents)
    for name, count, tokens in rows:
        low, high = int(name.split(" to ")[0]), int(name.split(" to ")[-1])
        own = [len(document) for document in documents if low <= len(document) <= high]
        assert (count, tokens) == (len(own), sum(own))


def test_the_command_tells_documents_duplicates_and_special_tokens_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = bpe_tokenizer(tmp_path)
    documents = texts(40)
    corpus = write_json_lines(tmp_path / "corpus.jsonl", [*documents, *documents[:5]])
    made = preprocess([str(corpus)], str(tmp_path / "out"), Task(TokenizerFiles(tokenizer), append_eod=True))
    prefix, picture = made.prefixes["text"], tmp_path / "pictures" / "lengths.svg"
    assert main(["corpus", prefix, "--tokenizer", tokenizer, "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert f"45 documents of 45 sequences, {made.tokens['text']:,} tokens (uint16); 0 documents are empty" in printed
    assert f"Exact duplicates: {5 + 40 - len(set(documents))} documents" in printed
    assert "Special tokens: 45 (" in printed
    assert "<|endoftext|>  45" in printed
    bars = ElementTree.parse(picture).getroot().findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) == len(examine(IndexedSource(prefix)).histogram()) > 1
    assert main(["corpus", prefix, "--picture", str(tmp_path / "lengths.png")]) == 1
    assert "its name must end with .svg" in capsys.readouterr().err
    wrong = tmp_path / "small"
    write_corpus(wrong, [[np.array([5, 60000])]])
    assert main(["corpus", str(wrong), "--tokenizer", tokenizer]) == 1
    assert "has the token 60000" in capsys.readouterr().err
    assert main(["corpus", str(tmp_path / "missing")]) == 1
