"""Tokenizers: each kind of file gives the tokens that its own library gives; training is deterministic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from libai_data.commands.train_tokenizer import main
from libai_data.data.datasets.vocabulary import vocabulary_tables
from libai_data.data.text.encoders import ChineseWordEncoder, open_encoder
from libai_data.data.text.tokenizer import TokenizerFiles
from libai_data.data.text.tokenizer_training import Training, train_tokenizer
from libai_data.errors import ConfigError
from tests.data.text.corpora import texts, write_json_lines

tokenizers = pytest.importorskip("tokenizers")

SENTENCES = ["Hello  worlds.", "ÉCLAIR unaffable", "你好世界 hello", "", "<|endoftext|>"]


def bert_vocabulary(folder: Path) -> Path:
    path = folder / "vocab.txt"
    words = [
        *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "Hello", "world", "##s", "."),
        *("eclair", "un", "##aff", "##able", "你", "好", "世", "界", "##好", "##界"),
    ]
    path.write_text("\n".join(words) + "\n", "utf-8")
    return path


@pytest.mark.parametrize("lower_case", [True, False])
def test_a_bert_vocabulary_gives_what_berts_tokenizer_gives(tmp_path: Path, lower_case: bool) -> None:
    path = bert_vocabulary(tmp_path)
    ours = TokenizerFiles(str(path), lower_case=lower_case).load()
    bert = tokenizers.BertWordPieceTokenizer(str(path), lowercase=lower_case)
    expected = [bert.encode(text, add_special_tokens=False).ids for text in SENTENCES]
    assert ours.encode_batch(SENTENCES) == expected
    assert (ours.pad_token_id, ours.cls_token_id, ours.sep_token_id, ours.mask_token_id) == (0, 2, 3, 4)
    assert (len(ours), ours.eod_token_id, ours.bos_token_id) == (20, 3, None)


def test_gpt2_files_and_their_folder_give_what_byte_level_bpe_gives(tmp_path: Path, tokenizer: str) -> None:
    trained = tokenizers.Tokenizer.from_file(tokenizer)
    folder = tmp_path / "gpt2"
    folder.mkdir()
    trained.model.save(str(folder))
    peer = tokenizers.ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    for files in (
        TokenizerFiles(str(folder)),
        TokenizerFiles(str(folder / "vocab.json"), merges=str(folder / "merges.txt")),
    ):
        assert files.load().encode_batch(texts(20)) == [peer.encode(text).ids for text in texts(20)]
    # Where the text says so itself, it is no end of a document.
    tokens = files.load()
    assert tokens.eod_token_id not in tokens.encode_batch(["<|endoftext|>"])[0]


def test_a_tokenizer_json_keeps_long_documents_whole_and_adds_nothing(tmp_path: Path, tokenizer: str) -> None:
    changed = tokenizers.Tokenizer.from_file(tokenizer)
    plain = changed.encode("the quick brown fox").ids
    changed.enable_truncation(2)
    changed.enable_padding(length=50)
    changed.model.dropout = 0.9
    end = [("<|endoftext|>", changed.token_to_id("<|endoftext|>"))]
    changed.post_processor = tokenizers.processors.TemplateProcessing("$A <|endoftext|>", special_tokens=end)
    changed.save(str(tmp_path / "changed.json"))
    assert TokenizerFiles(str(tmp_path / "changed.json")).load().encode_batch(["the quick brown fox"]) == [plain]


def test_special_tokens_in_a_text_are_text_if_they_are_escaped(tokenizer: str) -> None:
    texts_with = ["before <|endoftext|> after", "<|endoftext|>"]
    plain, escaped = (TokenizerFiles(tokenizer, escape_special_tokens=escape).load() for escape in (False, True))
    assert all(plain.eod_token_id in ids for ids in plain.encode_batch(texts_with))
    assert not any(escaped.eod_token_id in ids for ids in escaped.encode_batch(texts_with))
    backend = tokenizers.Tokenizer.from_file(tokenizer)
    assert [backend.decode(ids, skip_special_tokens=False) for ids in escaped.encode_batch(texts_with)] == texts_with
    prints = {str(TokenizerFiles(tokenizer, escape_special_tokens=escape).fingerprint()) for escape in (False, True)}
    assert len(prints) == 2


def test_sentencepiece_gives_its_own_tokens_and_t5s_sentinels(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("\n".join(texts(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "t5"), vocab_size=70, pad_id=3, minloglevel=2
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "t5.model"))
    ours = TokenizerFiles(str(tmp_path / "t5.model"), extra_ids=10).load()
    assert ours.encode_batch(texts(10)) == [model.encode(text) for text in texts(10)]
    # As in LiBai's T5Tokenizer: the first sentinel is the last token.
    assert ours.additional_special_tokens_ids == list(range(79, 69, -1))
    assert (len(ours), ours.pad_token_id, ours.eos_token_id) == (80, 3, 2)


def test_characters_of_a_chinese_word_behind_its_first_are_marked_where_the_vocabulary_can(
    tmp_path: Path, tokenizer: str
) -> None:
    pytest.importorskip("jieba")
    path = bert_vocabulary(tmp_path)
    ours = TokenizerFiles(str(path), lower_case=True, chinese_words=True).load()
    tokens = {ident: token for token, ident in ours.get_vocab().items()}
    found = ours.encode_batch(["你好 世界 hello worlds", "好hello"])
    assert [[tokens[ident] for ident in ids] for ids in found] == [
        ["你", "##好", "世", "##界", "hello", "world", "##s"],
        ["好", "hello"],
    ]
    with pytest.raises(ConfigError, match="BERT's vocabularies"):
        TokenizerFiles(tokenizer, chinese_words=True)


def test_merges_are_refused_where_they_would_not_be_used(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(ConfigError, match=rf"merges are for BPE's vocabularies \(.json\), not for {tmp_path}; leave"):
        TokenizerFiles(str(tmp_path), merges=str(tmp_path / "merges.txt"))


def test_jieba_is_given_short_stretches_however_long_a_text_without_punctuation_is(tmp_path: Path) -> None:
    jieba = pytest.importorskip("jieba")
    encoder = open_encoder([bert_vocabulary(tmp_path)], True, chinese_words=True)
    assert isinstance(encoder, ChineseWordEncoder)
    given: list[str] = []

    def noting(text: str) -> Any:
        given.append(text)
        return jieba.cut(text)

    encoder._cut = noting
    long = "好" * 5000 + "。" + "你好世界hello，" * 100
    encoder.encode([long])
    assert "".join(given) == long
    assert max(map(len, given)) <= 1024
    ordinary = "你好世界。我来到北京清华大学，卡拉OK 3.14 hello。他来到了网易杭研大厦"
    given.clear()
    encoder.encode([ordinary])
    assert [word for text in given for word in jieba.cut(text)] == list(jieba.cut(ordinary))


@pytest.mark.parametrize("model", ["bpe", "wordpiece"])
def test_random_replacements_are_never_special_tokens(tmp_path: Path, model: str) -> None:
    corpus = write_json_lines(tmp_path / "corpus.jsonl", texts(50))
    train_tokenizer([str(corpus)], str(tmp_path / "x.json"), Training(model, vocab_size=300, extra_ids=3))
    for path in (tmp_path / "x.json", bert_vocabulary(tmp_path)):
        tokenizer = TokenizerFiles(str(path)).load()
        drawn = {tokenizer.id_to_token(ident) for ident in vocabulary_tables(tokenizer).ordinary.tolist()}
        assert not drawn & {"[UNK]", "<unk>", *map(tokenizer.id_to_token, tokenizer.special_ids)}


def test_files_that_define_no_tokenizer_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("x.json", "x.model", "x.txt"):
        (tmp_path / name).write_text("nothing")
        with pytest.raises(ConfigError, match=name):
            TokenizerFiles(str(tmp_path / name)).load()
    with pytest.raises(ConfigError, match="no tokenizer file"):
        TokenizerFiles(str(tmp_path / "missing.json"))
    with pytest.raises(ConfigError, match="contains no tokenizer"):
        TokenizerFiles(str(tmp_path))


@pytest.mark.parametrize("model", ["bpe", "wordpiece"])
def test_training_gives_the_same_file_again_and_encodes_what_it_has_not_seen(tmp_path: Path, model: str) -> None:
    corpus = write_json_lines(tmp_path / "corpus.jsonl", texts(300), "bad\n")
    files = [tmp_path / f"{number}.json" for number in range(3)]
    for path in files:
        size = train_tokenizer([str(corpus)], str(path), Training(model, vocab_size=290, extra_ids=5))
        assert size <= 290
    assert len({path.read_bytes() for path in files}) == 1
    tokenizer = TokenizerFiles(str(files[0])).load()
    assert len(tokenizer.additional_special_tokens_ids) == 5
    if model == "bpe":
        unseen = "naïve 中文 \U0001f600\n\t"
        decoded = tokenizers.Tokenizer.from_file(str(files[0])).decode(tokenizer.encode_batch([unseen])[0])
        assert decoded == unseen
    else:
        assert None not in (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id)


def test_sizes_that_no_memory_holds_are_refused(tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(ConfigError, match="vocab_size is 1000000000000; it must be an int, 1 to 16777216"):
        Training(vocab_size=10**12)
    with pytest.raises(ConfigError, match="extra_ids is 1000000000000; it must be an int, 0 to 16777216"):
        Training(extra_ids=10**12)
    with pytest.raises(ConfigError, match="extra_ids is 1000000000000; it must be an int, 0 to 16777216"):
        TokenizerFiles(tokenizer, extra_ids=10**12)
    with pytest.raises(ConfigError, match="vocab_size is 30000; bpe needs at least 30257"):
        Training(extra_ids=30000)


def test_the_training_command_reads_what_preprocessing_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("\n".join(texts(50)))
    arguments = ["--input", str(tmp_path / "*.txt"), "--output", str(tmp_path / "out" / "t.json")]
    assert main([*arguments, "--vocab-size", "300"]) == 0
    assert "tokens in" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "t.json").read_text())["model"]["type"] == "BPE"
    assert main([*arguments, "--vocab-size", "100"]) == 2
    assert "bpe needs at least 257" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("\n")
    assert main(arguments) == 2
    assert "no document" in capsys.readouterr().err
