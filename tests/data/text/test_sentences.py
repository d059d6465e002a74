"""Splitting into sentences: linear in the text, whatever is repeated in it."""

from __future__ import annotations

import gzip
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.text import sentences
from libai_data.data.text.documents import read_piece
from libai_data.data.text.parts import Cutting, Piece, cut_into_parts
from libai_data.data.text.sentences import split_sentences
from tests.data.text.corpora import texts
from tests.properties import few_of, is_long_run

REPEATED = [".", "!", "?", "…", "。", " ", "\n", "\t", "\r", "\v", "\u3000", '"', "”", ")", "a", "中"]
PAIRS = [". ", "! ", ".)", "。)", " \n", "\n ", "\r\n", ".\n", "a.", "a ", "A. ", "A.\n", "a. ", ". A", "e.g. ", "Mr. "]
PAIRS += ["1. ", '. "', '." ']
SHORT_RUN = ".", " ", "\n", "a", "中", ". ", ".)", "\r\n", "a. ", "e.g. "


@pytest.mark.parametrize("text", few_of([*REPEATED, *PAIRS], *SHORT_RUN))
def test_megabytes_of_one_character_are_split_in_seconds(text: str) -> None:
    # A quadratic pattern would take hours.
    size = 10_000_000 // (1 if is_long_run() else 40)
    repeated = text * (size // len(text))
    start = time.process_time()
    found = split_sentences(repeated, keep_newlines=True)
    assert time.process_time() - start < 60
    assert "".join(found) in (repeated, "")


@pytest.mark.parametrize(
    "found",
    [
        ["今日は晴れです。", "猫がいます！", "ｶﾅ｡", "犬"],
        ["यह एक लोमड़ी है।", "वह कहाँ है?", "यहाँ॥", "हाँ"],
        ["هذا ثعلب.", "أين هو؟", "هنا"],
        ["یہ لومڑی ہے۔", "وہ کہاں ہے؟", "یہاں"],
        ["Սա աղվես է։", "Այո"],
        ["ይህ ቀበሮ ነው።", "የት ነው፧", "እዚህ"],
        ["ဒါမြေခွေးပါ။", "ဟုတ်တယ်"],
        ["នេះជាកញ្ជ្រោង។", "បាទ"],
    ],
)
def test_sentences_end_in_every_script(found: list[str]) -> None:
    assert split_sentences(" ".join(found)) == found


# As the module has it, but for the conditions that keep a match from beginning within a run.
PLAIN = re.compile(sentences._BOUNDARY.pattern.replace("(?<![.!?])", "").replace(r"(?<![ \t\r])", ""))


@given(st.text('.!?。…)"” \n\t\ra中A-', max_size=30), st.booleans())
def test_linear_patterns_find_what_plain_ones_find(text: str, keep: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences, "_BOUNDARY", PLAIN)
        expected = split_sentences(text, keep)
    assert PLAIN.pattern != sentences._BOUNDARY.pattern
    assert split_sentences(text, keep) == expected


@pytest.mark.parametrize("text", few_of(["\n", " ", "\r", "\n ", " \n", "\n\r", "a\n "], "\n", " ", "a\n "))
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_of_one_character_are_cut_in_seconds(
    tmp_path_factory: pytest.TempPathFactory, text: str, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("blank") / f"x.txt{suffix}"
    data = text.encode() * ((10_000_000 if is_long_run() else 1_000_000) // len(text))
    path.write_bytes(gzip.compress(data, 1) if suffix else data)
    start = time.process_time()
    pieces: list[Piece] = []
    for part in cut_into_parts([path], Cutting(part_bytes=1 << 16)):
        pieces.extend(part.pieces)
    found = sum(1 for piece in pieces for _ in read_piece(piece, ["text"]))
    assert time.process_time() - start < 15
    assert found == data.count(b"a")


def test_sentences_end_where_a_reader_would_end_them() -> None:
    text = (
        'Dr. Smith met J. Doe at 3.14 p.m. on Jan. 5. "Really?" he asked... Yes! See Fig. 2, e.g. the left.\n\n'
        "New paragraph without mark\n\nLast one"
    )
    assert split_sentences(text) == [
        "Dr. Smith met J. Doe at 3.14 p.m. on Jan. 5.",
        '"Really?" he asked...',
        "Yes!",
        "See Fig. 2, e.g. the left.",
        "New paragraph without mark",
        "Last one",
    ]
    assert split_sentences("今天天气很好。我们去公园吧！“好的。”他说。") == [
        "今天天气很好。",
        "我们去公园吧！",
        "“好的。”",
        "他说。",
    ]
    assert split_sentences(" \n ") == []


def test_kept_newlines_lose_nothing_of_the_text() -> None:
    for text in texts(20):
        text = text.replace(". ", ".\n")
        for whole in (text, "\n\n" + text, " \r\n \n\t" + text + "\n\n"):
            assert "".join(split_sentences(whole, keep_newlines=True)) == whole
