"""The command: `libai-data train-tokenizer --input "corpus/*.jsonl" --output tokenizer.json --vocab-size 30000`."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Sequence

from libai_data.commands.console import print_lines
from libai_data.commands.preprocess import add_input_arguments
from libai_data.data.text.parts import Cutting
from libai_data.data.text.tokenizer_training import BPE, MODELS, Training, train_tokenizer
from libai_data.errors import DataPipelineError


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="libai-data train-tokenizer", description=__doc__)
    add_input_arguments(arguments)
    group = arguments.add_argument_group("tokenizer")
    group.add_argument("--output", required=True, metavar="PATH", help="the tokenizer.json to write")
    group.add_argument("--model", choices=MODELS, default=BPE, help=f"kind of tokenizer (default {BPE}, byte-level)")
    group.add_argument("--vocab-size", type=int, default=30000, help="number of tokens (default 30000)")
    group.add_argument("--min-frequency", type=int, default=2, help="how often a token must occur (default 2)")
    group.add_argument("--do-lower-case", action="store_true", help="convert to lower case (WordPiece)")
    group.add_argument("--extra-ids", type=int, default=0, help="number of sentinels <extra_id_0> ... for T5")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Train a tokenizer; returns the exit code: 1 if that failed, 2 if the arguments do not fit."""
    asked = parser().parse_args(argv)

    def lines() -> Iterator[str]:
        training = Training(asked.model, asked.vocab_size, asked.min_frequency, asked.do_lower_case, asked.extra_ids)
        cutting = Cutting(asked.format)
        size = train_tokenizer(asked.input, asked.output, training, keys=asked.json_keys, cutting=cutting)
        yield f"{size} tokens in {asked.output}"

    # Python's handler of Ctrl-C would run only after the training, which is compiled code. Nothing is written before.
    interrupted = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return print_lines("train-tokenizer", lines, of_arguments=DataPipelineError)
    finally:
        signal.signal(signal.SIGINT, interrupted)
