"""Preprocessing: the tokens of every document, whoever does the work and however often it is interrupted."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.commands import main as command
from libai_data.commands.preprocess import main
from libai_data.data.sources.indexed_writer import IndexedWriter
from libai_data.data.text import shards
from libai_data.data.text.parts import Cutting, cut_into_parts
from libai_data.data.text.preprocessing import BadLines, preprocess
from libai_data.data.text.sentences import pieces_of, split_sentences
from libai_data.data.text.shards import Task, TokenizingError
from libai_data.data.text.tokenizer import TextTokenizer, TokenizerFiles
from libai_data.data.text.tokenizer_training import Training, train_tokenizer
from libai_data.errors import ConfigError
from tests.data.text.corpora import content, documents_of, texts, write_json_lines
from tests.distributed.processes import children_of, command_of
from tests.properties import slowly

tokenizers = pytest.importorskip("tokenizers")


def test_each_document_becomes_what_the_tokenizer_alone_makes_of_it(tmp_path: Path, tokenizer: str) -> None:
    documents = [*texts(50), "", "   ", "\u3000\u00a0", "ü 中文 \U0001f600", "x" * 5000]
    corpus = write_json_lines(tmp_path / "corpus.jsonl", documents)
    result = preprocess([str(corpus)], str(tmp_path / "out"), Task(TokenizerFiles(tokenizer), append_eod=True))
    alone = tokenizers.Tokenizer.from_file(tokenizer)
    end = alone.token_to_id("<|endoftext|>")
    expected = [[[*alone.encode(text).ids, end]] for text in documents if text.strip()]
    assert documents_of(result.prefixes["text"]) == expected
    assert (result.documents, result.empty, result.bad) == (len(expected), 3, 0)
    assert result.tokens["text"] == sum(len(sequence) for (sequence,) in expected)
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "out_text_document.bin", "out_text_document.idx"]


def test_a_tokenizer_that_does_not_know_the_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known, other = (
        write_json_lines(tmp_path / "a.jsonl", texts(60)),
        write_json_lines(tmp_path / "b.jsonl", ["中文"] * 5),
    )
    tokenizer = str(tmp_path / "wordpiece.json")
    train_tokenizer([str(known)], tokenizer, Training("wordpiece", vocab_size=200))
    for corpus, share in ((known, ""), (other, "100.0% of the tokens are unknown")):
        arguments = ["--input", str(corpus), "--tokenizer", tokenizer, "--output-prefix", str(tmp_path / "out")]
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        assert share in printed and ("unknown" in printed) == bool(share)


def test_suffixes_may_be_of_capital_letters(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "corpus").mkdir()
    corpus = write_json_lines(tmp_path / "corpus" / "A.JSONL", texts(5))
    (tmp_path / "corpus" / "B.Jsonl.GZ").write_bytes(gzip.compress(corpus.read_bytes()))
    result = preprocess([str(tmp_path / "corpus")], str(tmp_path / "out"), Task(TokenizerFiles(tokenizer)))
    assert (result.documents, result.bad) == (10, 0)
    assert len(documents_of(result.prefixes["text"])[0][0]) < 100


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "sentencepiece"])
def test_a_long_document_is_tokenized_in_pieces_with_the_same_tokens(
    tmp_path: Path, tokenizer: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_json_lines(tmp_path / "corpus.jsonl", [" ".join(texts(200)), "\n".join(texts(200)), *texts(3)])
    if kind == "wordpiece":
        tokenizer = str(tmp_path / "wordpiece.json")
        train_tokenizer([str(corpus)], tokenizer, Training("wordpiece", vocab_size=200))
    elif kind == "sentencepiece":
        sentencepiece = pytest.importorskip("sentencepiece")
        (tmp_path / "text").write_text("\n".join(texts(200)))
        prefix, tokenizer = str(tmp_path / "pieces"), str(tmp_path / "pieces.model")
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text"), model_prefix=prefix, vocab_size=70, minloglevel=2
        )
    whole = preprocess([str(corpus)], str(tmp_path / "whole"), Task(TokenizerFiles(tokenizer)))
    monkeypatch.setattr(shards, "LONGEST_TEXT", 500)
    part = Path(tmp_path / "parts")
    part.mkdir()
    (only,) = cut_into_parts([corpus], Cutting(part_bytes=1 << 20))
    shards.write_shard(part, only, Task(TokenizerFiles(tokenizer)), TokenizerFiles(tokenizer).load())
    assert content(str(part / "00000000-0")) == content(whole.prefixes["text"])


@pytest.mark.parametrize("split", [False, True])
def test_a_tokenizer_is_given_a_few_characters_at_once_however_long_a_document_is(
    tmp_path: Path, tokenizer: str, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_json_lines(tmp_path / "corpus.jsonl", [" ".join(texts(500)), *texts(300)])
    monkeypatch.setattr(shards, "LONGEST_TEXT", 2000)
    monkeypatch.setattr(shards, "_CHARACTERS_AT_ONCE", 2000)
    given: list[int] = []
    plain = TextTokenizer.encode_batch

    def counting(self: TextTokenizer, some: Sequence[str]) -> list[list[int]]:
        given.append(sum(map(len, some)))
        return plain(self, some)

    monkeypatch.setattr(TextTokenizer, "encode_batch", counting)
    (only,) = cut_into_parts([corpus], Cutting(part_bytes=1 << 20))
    task = Task(TokenizerFiles(tokenizer), split_sentences=split)
    shards.write_shard(tmp_path, only, task, task.tokenizer.load())
    assert max(given) <= 4000 < sum(given)


@given(st.text(" \nab中", max_size=200), st.integers(2, 40))
def test_pieces_are_the_text_and_none_is_longer_than_asked(text: str, longest: int) -> None:
    pieces = list(pieces_of(text, longest))
    assert "".join(pieces) == text
    assert all(longest // 2 <= len(piece) <= longest for piece in pieces[:-1])
    assert len(pieces[-1]) <= longest


@pytest.mark.slow
def test_a_document_of_60_mb_takes_less_than_2_gb(tmp_path: Path, tokenizer: str) -> None:
    text = "\n".join(texts(20_000))
    path = tmp_path / "long.jsonl"
    with open(path, "w") as file:
        file.write(json.dumps({"text": text * (60_000_000 // len(text))}))
    script = (
        "import resource, sys; from libai_data.data.text import *;"
        "preprocess([sys.argv[1]], sys.argv[2], Task(TokenizerFiles(sys.argv[3])));"
        "print(max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(tmp_path / "out"), tokenizer], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2_000_000


def test_sentences_become_the_sequences_of_a_document(tmp_path: Path, tokenizer: str) -> None:
    documents = texts(40)
    corpus = write_json_lines(tmp_path / "corpus.jsonl", documents)
    task = Task(TokenizerFiles(tokenizer), split_sentences=True)
    result = preprocess([str(corpus)], str(tmp_path / "out"), task)
    alone = tokenizers.Tokenizer.from_file(tokenizer)
    assert result.prefixes["text"].endswith("out_text_sentence")
    expected = [[alone.encode(sentence).ids for sentence in split_sentences(text)] for text in documents]
    assert documents_of(result.prefixes["text"]) == expected


def test_the_result_does_not_depend_on_workers_nor_parts(tmp_path: Path, tokenizer: str) -> None:
    for number in range(3):
        write_json_lines(tmp_path / f"{number}.jsonl", texts(60, seed=number), "bad\n" * (number == 1))
    found: list[list[bytes]] = []
    for workers, part_bytes in ((1, 0), (1, 700), (2, 700), (3, 5000)):
        prefix = str(tmp_path / f"out{len(found)}")
        result = preprocess(
            [f"{tmp_path}/*.jsonl"],
            prefix,
            Task(TokenizerFiles(tokenizer)),
            cutting=Cutting(part_bytes=part_bytes),
            workers=workers,
        )
        assert result.documents == 180
        found.append([*content(result.prefixes["text"]), Path(prefix + ".bad_lines").read_bytes()])
    assert all(each == found[0] for each in found)
    bad = json.loads(found[0][2])
    assert (bad["file"], bad["line"]) == (str(tmp_path / "1.jsonl"), 61)


def test_several_keys_become_several_datasets_and_parquet_is_as_good(tmp_path: Path, tokenizer: str) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    first, second = texts(30, 1), texts(30, 2)
    table = pyarrow.table({"title": [*first, None], "body": [*second, "left out"], "other": list(range(31))})
    parquet.write_table(table, str(tmp_path / "corpus.parquet"), row_group_size=7)
    rows = [json.dumps({"title": title, "body": body}) for title, body in zip(first, second)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows))
    task = Task(TokenizerFiles(tokenizer), ("title", "body"))
    results = [
        preprocess([str(tmp_path / f"corpus.{kind}")], str(tmp_path / kind), task, cutting=Cutting(part_bytes=300))
        for kind in ("parquet", "jsonl")
    ]
    for key in ("title", "body"):
        assert content(results[0].prefixes[key]) == content(results[1].prefixes[key])
    bad = json.loads((tmp_path / "parquet.bad_lines").read_text())
    assert (bad["line"], results[0].bad, results[1].bad) == (31, 1, 0)
    assert "'title' is a NoneType" in bad["reason"]


def test_a_run_that_ends_between_two_keys_leaves_no_key_of_an_earlier_run(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, corpus = Task(TokenizerFiles(tokenizer), ("text", "title")), tmp_path / "corpus.jsonl"
    closed: list[str] = []
    close = IndexedWriter.close

    def close_one(writer: IndexedWriter) -> None:
        if ".parts" not in writer.prefix:
            closed.append(f"{writer.prefix}.idx")
            if len(closed) == 2:
                raise KeyboardInterrupt
        close(writer)

    for text in ("one", "two"):
        corpus.write_text(json.dumps({"text": text, "title": text}) + "\n")
        if text == "two":
            monkeypatch.setattr(IndexedWriter, "close", close_one)
        with pytest.raises(KeyboardInterrupt) if text == "two" else nullcontext():
            preprocess([str(corpus)], str(tmp_path / "out"), task)
    assert [str(path) for path in tmp_path.glob("out_*.idx")] == closed[:1]


def test_a_broken_parquet_file_is_told_of_and_the_others_are_read(tmp_path: Path, tokenizer: str) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    write_json_lines(tmp_path / "b.jsonl", texts(5))
    result = preprocess([str(tmp_path)], str(tmp_path / "out" / "x"), Task(TokenizerFiles(tokenizer)))
    assert (result.documents, result.bad) == (5, 1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"txt": "a word"}\n' * 120, "no document with a token: 0 empty ones and 120 bad lines"),
        (b"no JSON\n" * 120, "no document with a token: 0 empty ones and 120 bad lines"),
        (b'{"text": ""}\n', "no document with a token: 1 empty ones and 0 bad lines"),
        (b"", "no document with a token: 0 empty ones and 0 bad lines"),
        (b"\n \n", "no document with a token: 0 empty ones and 0 bad lines"),
        (
            b'[{"text": "a"}, {"text": "b"}]',
            "a JSON list, but an object is expected; JSON lines have one object per line",
        ),
        (b'[\n{"text": "a"},\n{"text": "b"}\n]', "JSON lines have one object per line"),
        (b'{"txt": "a word"}\n' * 3, "no 'text'; there are ['txt']. Did you mean 'txt'?"),
        ('{"text": "a"}\n'.encode("utf-16"), "the file is UTF-16, not UTF-8"),
        ('{"text": "a"}\n'.encode("utf-32"), "iconv -f UTF-32 -t UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 12345\n", "run `git lfs pull`"),
    ],
)
def test_an_input_without_a_document_fails_with_the_reason_and_leaves_no_corpus(
    tmp_path: Path, tokenizer: str, content: bytes, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, trained = tmp_path / "bad.jsonl", tmp_path / "trained.json"
    path.write_bytes(content)
    given, output = ["--input", str(path)], ["--tokenizer", tokenizer, "--output-prefix", str(tmp_path / "out")]
    assert command(["preprocess", *given, *output]) == 1
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.glob("out_*")) + list(tmp_path.glob("out.parts"))
    # Of a list over several lines, the last line alone is an object.
    if not content.startswith(b"[\n"):
        assert command(["train-tokenizer", *given, "--output", str(trained), "--vocab-size", "300"]) == 2
        assert "bad lines" in reason or reason in capsys.readouterr().err
        assert not trained.exists()
    # Nothing is in the way of the next attempt.
    path.write_text('{"other": "a word"}\n')
    assert command(["preprocess", *given, "--json-keys", "other", *output]) == 0


def test_parquet_files_that_were_joined_are_no_documents(tmp_path: Path, tokenizer: str) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["one"]}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes() * 2)
    with pytest.raises(BadLines, match=r"a\.parquet: a second Parquet file follows the first one"):
        preprocess([str(tmp_path)], str(tmp_path / "out"), Task(TokenizerFiles(tokenizer)), refuse_bad=True)


def test_a_column_that_a_parquet_file_does_not_have_is_named_with_the_nearest(tmp_path: Path, tokenizer: str) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"texts": ["a"] * 100, "id": range(100)}), str(tmp_path / "x.parquet"))
    with pytest.raises(BadLines, match=r"x.parquet: no 'text'; there are \['id', 'texts'\]. Did you mean 'texts'\?"):
        preprocess([str(tmp_path / "x.parquet")], str(tmp_path / "out"), Task(TokenizerFiles(tokenizer)))


def test_a_tokenizer_never_overwrites_its_input(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some words\n")
    with pytest.raises(ConfigError, match=r"output is .*a\.txt, which is an input too, and would be overwritten"):
        train_tokenizer([str(path)], str(path), Training())
    assert path.read_text() == "some words\n"


@pytest.mark.parametrize("keys", [("title", "text"), ("text", "title")])
def test_a_document_counts_if_any_key_has_a_token(tmp_path: Path, tokenizer: str, keys: tuple[str, ...]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"title": "", "text": "a fox"}\n{"title": " ", "text": ""}\n')
    made = preprocess([str(path)], str(tmp_path / "out"), Task(TokenizerFiles(tokenizer), keys))
    assert (made.documents, made.empty, made.tokens["title"]) == (1, 1, 0)
    assert len(documents_of(made.prefixes["text"])) == 1


def test_a_key_that_is_given_twice_or_names_no_file_is_refused(tokenizer: str) -> None:
    with pytest.raises(ConfigError, match=r"keys of texts \(--json-keys\) are \['text', 'text'\]; give one or more"):
        Task(TokenizerFiles(tokenizer), ("text", "text"))
    for key in ("", "meta/text"):
        with pytest.raises(ConfigError, match="a key is a part of the name of its output file"):
            Task(TokenizerFiles(tokenizer), (key,))


def test_a_path_or_number_in_place_of_settings_is_refused(tmp_path: Path, tokenizer: str) -> None:
    path: Any = tokenizer
    with pytest.raises(ConfigError, match=r"tokenizer is '.*'; it must be a TokenizerFiles"):
        Task(path)
    with pytest.raises(ConfigError, match=r"task is '.*'; it must be a Task"):
        preprocess([path], str(tmp_path / "out"), path)
    with pytest.raises(ConfigError, match=r"cutting is '.*'; it must be a Cutting, or None"):
        preprocess([path], str(tmp_path / "out"), Task(TokenizerFiles(tokenizer)), cutting=path)
    with pytest.raises(ConfigError, match=r"training is '.*'; it must be a Training"):
        train_tokenizer([path], str(tmp_path / "t.json"), path)
    with pytest.raises(ConfigError, match=r"cutting is '.*'; it must be a Cutting, or None"):
        train_tokenizer([path], str(tmp_path / "t.json"), Training(), cutting=path)


@pytest.mark.parametrize("keys", ["body", ("text", "text"), (), None])
def test_keys_that_are_no_list_of_names_are_refused(tmp_path: Path, tokenizer: str, keys: Any) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some words\n")
    with pytest.raises(ConfigError, match=r"keys of texts .* are .*; give one or more"):
        Task(TokenizerFiles(tokenizer), keys)
    with pytest.raises(ConfigError, match=r"keys of texts .* are .*; give one or more"):
        train_tokenizer([str(path)], str(tmp_path / "t.json"), Training(vocab_size=300), keys=keys)


def test_bad_lines_of_a_file_whose_name_is_not_utf_8_are_listed(tmp_path: Path, tokenizer: str) -> None:
    path = str(tmp_path / os.fsdecode(b"\xff.jsonl"))
    Path(path).write_text('{"text": "a fox"}\n{"text"\n')
    made = preprocess([path], str(tmp_path / "out"), Task(TokenizerFiles(tokenizer)))
    assert made.bad_file is not None
    assert json.loads(Path(made.bad_file).read_text("utf-8"))["file"] == path


def test_a_flag_that_is_a_text_is_refused(tokenizer: str) -> None:
    given: Any = "false"
    with pytest.raises(ConfigError, match="split_sentences is 'false'; it must be True or False"):
        Task(TokenizerFiles(tokenizer), split_sentences=given)
    with pytest.raises(ConfigError, match="lower_case is 'false'; it must be True or False"):
        Training("wordpiece", lower_case=given)


def test_a_line_with_a_repeated_key_is_a_bad_line(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two", "text": "three"}\n')
    with pytest.raises(BadLines, match=r"a.jsonl, line 2: not JSON: an object has the key 'text' twice"):
        preprocess([str(tmp_path / "a.jsonl")], str(tmp_path / "out"), Task(TokenizerFiles(tokenizer)), refuse_bad=True)


def test_bad_lines_end_the_run_only_if_asked_and_then_leave_no_result(tmp_path: Path, tokenizer: str) -> None:
    corpus = write_json_lines(tmp_path / "corpus.jsonl", texts(5), '{"txt": "misnamed"}\n')
    task = Task(TokenizerFiles(tokenizer))
    with pytest.raises(BadLines, match=r"corpus.jsonl, line 6: no 'text'; there are \['txt'\]"):
        preprocess([str(corpus)], str(tmp_path / "out"), task, refuse_bad=True)
    assert not list(tmp_path.glob("out_text*"))
    (tmp_path / "out_text_document.bin.1.unfinished").touch()  # as if a process was killed while it joined the shards
    result = preprocess([str(corpus)], str(tmp_path / "out"), task)
    assert (result.documents, result.bad, result.kept) == (5, 1, 1)


SLOW = """
import sys
from libai_data.data.text import shards
from libai_data.data.text.parts import Cutting, cut_into_parts
from libai_data.data.text.preprocessing import preprocess
from libai_data.data.text.shards import Task
from libai_data.data.text.tokenizer import TokenizerFiles
corpus, prefix, tokenizer, workers, after = sys.argv[1:]
told = []
def tell(done, total, report):
    told.append(done)
    if len(told) == int(after):
        print(flush=True)
        sys.stdin.read()
preprocess([corpus], prefix, Task(TokenizerFiles(tokenizer)), cutting=Cutting(part_bytes=2000), workers=int(workers),
           progress=tell)
"""


@pytest.mark.parametrize("workers", [slowly(1), 2])
def test_after_kill_9_the_same_call_keeps_the_finished_shards_and_gives_the_same_bytes(
    tmp_path: Path, tokenizer: str, workers: int
) -> None:
    corpus = write_json_lines(tmp_path / "corpus.jsonl", texts(1500))
    task, cutting = Task(TokenizerFiles(tokenizer)), Cutting(part_bytes=2000)
    expected = content(preprocess([str(corpus)], str(tmp_path / "whole"), task).prefixes["text"])
    kept: list[int] = []
    for after in (3, 20):
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW, str(corpus), str(tmp_path / "out"), tokenizer, str(workers), str(after)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stdout.readline()
        process.kill()
        process.communicate()
        kept.append(len(list((tmp_path / "out.parts").glob("*.json"))) - 1)
        assert kept[-1] >= after
    assert not list(tmp_path.glob("out_text*"))
    (tmp_path / "out_text_document.bin.1.unfinished").touch()  # as if a process was killed while it joined the shards
    result = preprocess([str(corpus)], str(tmp_path / "out"), task, cutting=cutting, workers=workers)
    assert result.kept >= kept[-1]
    assert result.documents == 1500
    assert content(result.prefixes["text"]) == expected
    assert not (tmp_path / "out.parts").exists() and not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("form", ["", "text"])
def test_an_output_within_the_input_folder_is_no_input_of_the_next_run(
    tmp_path: Path, tokenizer: str, form: str
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_json_lines(folder / "a.jsonl", texts(60))
    task, prefix = Task(TokenizerFiles(tokenizer)), str(folder / "out")

    class Stopped(Exception):
        pass

    def stop(done: int, total: int, report: object) -> None:
        raise Stopped

    # Whatever is left of a run that was stopped, and of one that has ended, is not tokenized.
    found: list[tuple[int, list[bytes]]] = []
    for progress in (stop, None, None):
        options: dict[str, Any] = {} if progress is None else {"progress": progress}
        cutting = Cutting(format=form, part_bytes=2000)
        with pytest.raises(Stopped) if progress else nullcontext():
            result = preprocess([str(folder)], prefix, task, cutting=cutting, **options)
            found.append((result.documents, content(result.prefixes["text"])))
    assert found[0] == found[1]
    assert found[0][0] == 60


def test_a_shard_that_is_damaged_afterwards_is_made_anew(tmp_path: Path, tokenizer: str) -> None:
    corpus = write_json_lines(tmp_path / "corpus.jsonl", [*texts(50), ""], "bad\n")
    task, cutting = Task(TokenizerFiles(tokenizer)), Cutting(part_bytes=1000)
    with pytest.raises(BadLines):
        preprocess([str(corpus)], str(tmp_path / "out"), task, cutting=cutting, refuse_bad=True)
    shards = sorted((tmp_path / "out.parts").glob("*.bin"))
    os.truncate(shards[0], 1)
    shards[1].unlink()
    result = preprocess([str(corpus)], str(tmp_path / "out"), task, cutting=cutting)
    assert result.kept == len(shards) - 2
    whole = preprocess([str(corpus)], str(tmp_path / "whole"), task)
    assert content(result.prefixes["text"]) == content(whole.prefixes["text"])


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path, tokenizer: str) -> None:
    corpus = write_json_lines(tmp_path / "corpus.jsonl", texts(1500))
    killed: list[int] = []

    def kill_one(done: int, total: int, report: object) -> None:
        if not killed:
            workers = [
                pid for pid in children_of(os.getpid()) if b"libai_data.data.shard_work.process_pool" in command_of(pid)
            ]
            killed.append(workers[0])
            os.kill(workers[0], signal.SIGKILL)

    task, cutting = Task(TokenizerFiles(tokenizer)), Cutting(part_bytes=5000)
    result = preprocess([str(corpus)], str(tmp_path / "out"), task, cutting=cutting, workers=2, progress=kill_one)
    assert killed
    whole = preprocess([str(corpus)], str(tmp_path / "whole"), task)
    assert content(result.prefixes["text"]) == content(whole.prefixes["text"])


def test_shards_of_another_corpus_or_task_are_refused_by_name(tmp_path: Path, tokenizer: str) -> None:
    corpus = write_json_lines(tmp_path / "corpus.jsonl", texts(5), "bad\n")
    task = Task(TokenizerFiles(tokenizer))
    with pytest.raises(BadLines):
        preprocess([str(corpus)], str(tmp_path / "out"), task, refuse_bad=True)
    with pytest.raises(ConfigError, match="append_eod was false, and is now true"):
        preprocess([str(corpus)], str(tmp_path / "out"), Task(TokenizerFiles(tokenizer), append_eod=True))
    os.utime(corpus, ns=(1, 1))
    with pytest.raises(ConfigError, match="inputs was"):
        preprocess([str(corpus)], str(tmp_path / "out"), task)


def test_two_runs_with_one_output_do_not_meet(tmp_path: Path, tokenizer: str) -> None:
    corpus = write_json_lines(tmp_path / "corpus.jsonl", texts(5))
    task = Task(TokenizerFiles(tokenizer))

    def second(done: int, total: int, report: object) -> None:
        with pytest.raises(ConfigError, match="another process is writing to"):
            preprocess([str(corpus)], str(tmp_path / "out"), task)

    assert preprocess([str(corpus)], str(tmp_path / "out"), task, progress=second).documents == 5


def test_libais_flags_work_and_tell_what_was_done(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s", "."]))
    corpus = write_json_lines(tmp_path / "corpus.jsonl", ["Hello worlds. World hello.", "hello"])
    arguments = [
        *("--input", str(corpus), "--json-keys", "text", "--split-sentences", "--tokenizer-name", "BertTokenizer"),
        *("--vocab-file", str(vocabulary), "--do-lower-case", "--append-eod", "--dataset-impl", "mmap"),
        *("--output-prefix", str(tmp_path / "out"), "--workers", "2", "--log-interval", "1"),
    ]
    done = subprocess.run(
        [sys.executable, str(repository / "tools" / "preprocess_data.py"), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "2 documents" in done.stdout
    assert documents_of(str(tmp_path / "out_text_sentence")) == [[[5, 6, 7, 8], [6, 5, 8, 3]], [[5, 3]]]
    assert main(["--input", str(corpus), "--output-prefix", str(tmp_path / "x")]) == 2
    assert "give the tokenizer by" in capsys.readouterr().err


def test_a_worker_that_dies_again_and_again_ends_the_run_with_its_part(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_json_lines(tmp_path / "corpus.jsonl", texts(5))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TokenizingError, match=r"(?s)3 processes died at part 0 .*corpus.jsonl.* exit code 1"):
        preprocess([str(corpus)], str(tmp_path / "out"), Task(TokenizerFiles(tokenizer)), workers=2)


def test_an_input_that_changes_while_it_is_read_is_named_and_no_result_is_written(
    tmp_path: Path, tokenizer: str
) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", texts(5))

    def change(*_: object) -> None:
        os.utime(path, ns=(1, 1))

    with pytest.raises(ConfigError, match=r"inputs changed while they were read: \['.*a.jsonl'\]; remove .*\.parts"):
        preprocess([str(path)], str(tmp_path / "out"), Task(TokenizerFiles(tokenizer)), progress=change)
    assert not list(tmp_path.glob("*.idx"))
