"""Which token ends and begins documents, in the layouts of published tokenizers; each is a small one of its kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from libai_data.commands import main
from libai_data.data.text.preprocessing import preprocess
from libai_data.data.text.shards import Task
from libai_data.data.text.tokenizer import TokenizerFiles
from libai_data.errors import ConfigError
from tests.data.text.corpora import byte_level_folder, documents_of, texts, write_json_lines

tokenizers = pytest.importorskip("tokenizers")

BAR, BLOCK = "\uff5c", "\u2581"
DEEPSEEK_END = f"<{BAR}end{BLOCK}of{BLOCK}sentence{BAR}>"


GEMMA = {"special": ["<pad>", "<eos>", "<bos>", "<unk>"], "text_tokens": ["<s>", "</s>", "<h1>"]}
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "llama 3": (
        {
            "special": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
            "config": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        },
        "<|end_of_text|>",
    ),
    "llama 3, for chats": (
        {
            "special": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
            "config": {"eos_token": {"content": "<|eot_id|>", "lstrip": False}},
        },
        "<|eot_id|>",
    ),
    "llama 3, bare": ({"special": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]}, "<|end_of_text|>"),
    "deepseek, bare": ({"special": [DEEPSEEK_END]}, DEEPSEEK_END),
    "gemma": ({**GEMMA, "config": {"eos_token": "<eos>", "bos_token": "<bos>"}}, "<eos>"),
    "gemma, bare": (GEMMA, "<eos>"),
    "qwen": ({"special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]}, "<|endoftext|>"),
    "xlnet": ({"special": ["<s>", "</s>", "<eod>"]}, "<eod>"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_end_with_what_the_folder_says_and_the_token_is_printed(
    tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given, expected = LAYOUTS[layout]
    folder = byte_level_folder(tmp_path / "tokenizer", **given)
    corpus = write_json_lines(tmp_path / "corpus.jsonl", texts(5))
    arguments = ["--input", str(corpus), "--output-prefix", str(tmp_path / "out"), "--tokenizer", str(folder)]
    assert main(["preprocess", *arguments, "--append-eod"]) == 0
    ident = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(expected)
    assert f"each document ends with {expected} (id {ident})" in capsys.readouterr().out
    assert all(document[0][-1] == ident for document in documents_of(str(tmp_path / "out_text_document")))


def test_tokens_that_are_named_begin_and_end_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = byte_level_folder(tmp_path / "tokenizer", ["<|begin|>", "<|stop|>"])
    corpus = write_json_lines(tmp_path / "corpus.jsonl", texts(5))
    arguments = ["preprocess", "--input", str(corpus), "--output-prefix", str(tmp_path / "out"), "--split-sentences"]
    arguments += ["--tokenizer", str(folder)]
    assert main([*arguments, "--eod-token", "<|stop|>", "--bos-token", "<|begin|>"]) == 0
    printed = capsys.readouterr().out
    tokenizer = TokenizerFiles(str(folder)).load()
    begin, end = tokenizer.id_of("<|begin|>"), tokenizer.id_of("<|stop|>")
    assert f"begins with <|begin|> (id {begin})" in printed
    assert f"ends with <|stop|> (id {end})" in printed
    for document in documents_of(str(tmp_path / "out_text_sentence")):
        flat = [token for sentence in document for token in sentence]
        assert (flat[0], flat[-1]) == (begin, end)
        assert begin not in flat[1:] and end not in flat[:-1]
    assert main([*arguments, "--eod-token", "<|stopp|>"]) == 2
    assert "no token '<|stopp|>'. Did you mean '<|stop|>'?" in capsys.readouterr().err
    assert main([*arguments, "--append-eod"]) == 2
    assert "name it (--eod-token)" in capsys.readouterr().err


def test_the_folders_word_counts_for_every_role(tmp_path: Path) -> None:
    config = {"pad_token": "<|im_end|>", "added_tokens_decoder": {"400": {"content": "<extra>", "special": True}}}
    folder = byte_level_folder(tmp_path, ["<|endoftext|>", "<|im_end|>", "<pad>"], config=config)
    tokenizer = TokenizerFiles(str(folder)).load()
    assert tokenizer.pad_token_id == tokenizer.id_of("<|im_end|>")
    assert (tokenizer.id_of("<extra>"), len(tokenizer)) == (400, 401)
    before = TokenizerFiles(str(folder)).fingerprint()
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    assert TokenizerFiles(str(folder)).fingerprint() != before
    for content, words in (
        ("[]", "contains a JSON list"),
        ("{", "is not JSON"),
        ('{"eos_token": "<gone>"}', "'<gone>'"),
        ('{"added_tokens_decoder": {"x": "<y>"}}', "must have ids as keys"),
        ('{"added_tokens_decoder": ["<y>"]}', "must have ids as keys"),
    ):
        (folder / "tokenizer_config.json").write_text(content)
        with pytest.raises(ConfigError, match=words):
            TokenizerFiles(str(folder)).load()


def test_a_folder_that_is_named_by_a_file_address_has_its_settings(tmp_path: Path) -> None:
    config = {"pad_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    folder = byte_level_folder(tmp_path, ["<|endoftext|>", "<|im_end|>"], config=config)
    tokenizer = TokenizerFiles(f"file://{folder}").load()
    assert tokenizer.pad_token_id == tokenizer.id_of("<|im_end|>")
    assert tokenizer.chat_template == "{{ messages }}"
    with pytest.raises(ConfigError, match="merges are for BPE's vocabularies"):
        TokenizerFiles(f"file://{folder}", merges="merges.txt")


def test_the_command_names_an_address_of_a_tokenizer_as_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = byte_level_folder(tmp_path / "tokenizer", ["<|endoftext|>"])
    corpus = write_json_lines(tmp_path / "corpus.jsonl", texts(5))
    arguments = ["preprocess", "--input", str(corpus), "--output-prefix", str(tmp_path / "out"), "--tokenizer"]
    assert main([*arguments, "s3://bucket/tokenizer.json"]) == 2
    assert "'s3://bucket/tokenizer.json', an address in a store" in capsys.readouterr().err
    assert main([*arguments, f"file://{folder}"]) == 0


def test_a_folder_of_bert_says_whether_case_is_lowered(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello"]))
    assert TokenizerFiles(str(tmp_path)).load().encode_batch(["Hello"]) == [[1]]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert TokenizerFiles(str(tmp_path)).load().encode_batch(["Hello"]) == [[5]]


def test_a_model_of_sentencepiece_says_its_special_tokens(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("\n".join(texts(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "gemma"), vocab_size=70, pad_id=0, eos_id=1, bos_id=2,
        unk_id=3, eos_piece="<eos>", bos_piece="<bos>", user_defined_symbols="</s>,<s>", minloglevel=2,
    )  # fmt: skip
    tokenizer = TokenizerFiles(str(tmp_path / "gemma.model")).load()
    assert (tokenizer.eod_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (1, 1, 2)
    corpus = write_json_lines(tmp_path / "corpus.jsonl", texts(3))
    task = Task(TokenizerFiles(str(tmp_path / "gemma.model")), append_eod=True)
    result = preprocess([str(corpus)], str(tmp_path / "out"), task)
    assert result.end == ("<eos>", 1)
