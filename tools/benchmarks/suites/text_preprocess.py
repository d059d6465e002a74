"""Text: tokens by `preprocess` beside the tokenizer alone, and BERT and T5 samples on one core."""

from __future__ import annotations

import json
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable

import numpy as np

from libai_data.data.datasets import BertDataset, T5Dataset
from libai_data.data.random.sample_random import reading_samples
from libai_data.data.sources.indexed_writer import IndexedWriter
from libai_data.data.text import Task, TokenizerFiles, Training, preprocess, train_tokenizer
from tools.benchmarks.rows import AtLeast, AtMost, Row, Scale, Unavailable, contender

_OF_TOKENIZER, _OF_CORES = 0.7, 0.85
_TEXTS_AT_ONCE = 256
_SPECIAL = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
_SENTINELS, _WORDS = 100, 30000


def rows(scale: Scale) -> list[Row]:
    """The rows of the suite; the corpora are made here, in `scale.folder`."""
    sentences = _write_sentences(scale.folder / "sentences", 200 if scale.quick else 2000)
    return [*_preprocess(scale), *_samples(scale, sentences)]


def _preprocess(scale: Scale) -> list[Row]:
    megabytes = 0.5 if scale.quick else 24
    work = f"{megabytes:g} MB of Python sources as JSON lines, byte-level BPE"
    corpus = scale.folder / "corpus.jsonl"
    made = partial(_prepared, corpus, scale.folder / "tokenizer.json", int(megabytes * 1e6))
    alone = contender("tokenizer", lambda: _tokenizer_alone(corpus), made)
    return [
        Row(
            f"preprocess-{workers}",
            work,
            str(workers),
            (alone, contender("preprocess", partial(_preprocessing, corpus, workers), made)),
            (AtLeast("preprocess", "tokenizer", _OF_TOKENIZER * (workers * _OF_CORES if workers > 1 else 1)),),
        )
        for workers in (1, 2)
    ]


def _prepared(corpus: Path, tokenizer: Path, size: int) -> None:
    """Write the sources of the standard library, over and over up to a size, and train a tokenizer on them."""
    if tokenizer.exists():
        return
    texts = [path.read_text("utf-8", errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    with open(corpus, "w", encoding="utf-8") as file:
        written = number = 0
        while written < size:
            written += file.write(json.dumps({"text": texts[number % len(texts)]}) + "\n")
            number += 1
    try:
        train_tokenizer([str(corpus)], str(tokenizer), Training(vocab_size=8000))
    except ValueError as error:
        raise Unavailable(str(error)) from error


def _tokenizer_alone(corpus: Path) -> float:
    """The tokenizer itself, on texts in memory, on one core; seconds."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus.with_name("tokenizer.json")))
    # What preprocessing calls too: without the places in the text.
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
    texts = [json.loads(line)["text"] for line in corpus.read_text("utf-8").splitlines()]
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        start = time.perf_counter()
        for first in range(0, len(texts), _TEXTS_AT_ONCE):
            for encoding in encode(texts[first : first + _TEXTS_AT_ONCE], add_special_tokens=False):
                _ = encoding.ids
        return time.perf_counter() - start
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _preprocessing(corpus: Path, workers: int) -> float:
    """From JSON lines on disk to `.bin/.idx`, the start of the processes included; seconds."""
    folder = corpus.with_name(f"out-{workers}")
    task = Task(TokenizerFiles(str(corpus.with_name("tokenizer.json"))))
    start = time.perf_counter()
    preprocess([str(corpus)], str(folder / "corpus"), task, workers=workers)
    seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    return seconds


class _Vocabulary:
    """Numbered words, a third of them pieces that go on with a word."""

    pad_token_id, unk_token_id, cls_token_id, sep_token_id, mask_token_id, bos_token_id, eos_token_id = range(7)
    additional_special_tokens_ids = tuple(range(len(_SPECIAL), len(_SPECIAL) + _SENTINELS))

    def get_vocab(self) -> Any:
        """Token -> id."""
        names = [f"[{name}]" for name in _SPECIAL] + [f"<extra_id_{number}>" for number in range(_SENTINELS)]
        names += [f"{'##' * (number % 3 == 0)}w{number}" for number in range(_WORDS)]
        return {name: ident for ident, name in enumerate(names)}


def _write_sentences(prefix: Path, documents: int) -> Path:
    """Write documents of 20 sentences of 10 to 50 random tokens."""
    random = np.random.default_rng(0)
    with IndexedWriter(prefix) as writer:
        for _ in range(documents):
            sizes = random.integers(10, 51, 20)
            first = len(_SPECIAL) + _SENTINELS
            writer.add_document([random.integers(first, first + _WORDS, size, dtype=np.uint16) for size in sizes])
    return prefix


def _samples(scale: Scale, prefix: Path) -> list[Row]:
    count = 100 if scale.quick else 3000

    def row(name: str, dataset: Callable[..., Any], limit: float) -> Row:
        def measure() -> float:
            return _microseconds(dataset(name, _Vocabulary(), data_prefix=prefix, max_num_samples=count))

        work = f"{name} samples of 512 tokens, one core"
        return Row(name, work, "0", (contender("libai_data", measure),), (AtMost("libai_data", limit, "microseconds"),))

    return [row("bert", BertDataset, 400), row("t5", T5Dataset, 250)]


def _microseconds(dataset: Any) -> float:
    """Processor time of a sample, as a loader reads it."""
    start = time.process_time()
    for index in range(len(dataset)):
        with reading_samples([(0, 0, index)]):
            dataset[index]
    return (time.process_time() - start) / len(dataset) * 1e6
