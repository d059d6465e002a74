"""The command: `libai-data preprocess --input corpus.jsonl --tokenizer tokenizer.json --output-prefix data/corpus`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from libai_data.commands.console import print_lines
from libai_data.data.progress_bar import progress_bar
from libai_data.data.text.files import FORMATS
from libai_data.data.text.parts import Cutting
from libai_data.data.text.preprocessing import CLUSTERS, Preprocessed, preprocess
from libai_data.data.text.shards import ShardReport, Task
from libai_data.data.text.tokenizer import TokenizerFiles
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import PATH, check, whole

TOKENIZER_NAMES = ("BertTokenizer", "GPT2Tokenizer", "RobertaTokenizer", "T5Tokenizer")
_EXTRA_IDS_OF_T5 = 100
_MOST_UNKNOWN = 0.01  # largest share of unknown tokens without a warning


def add_input_arguments(arguments: argparse.ArgumentParser) -> None:
    """Add the arguments that select the documents."""
    group = arguments.add_argument_group("input data")
    group.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="files, globs or folders; .gz, .bz2, .xz and .zst too"
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of JSON objects, or columns, with the text",
    )
    group.add_argument("--format", choices=FORMATS, default="", help="format of all files (default: by file name)")


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="libai-data preprocess", description=__doc__)
    add_input_arguments(arguments)
    group = arguments.add_argument_group("sentences")
    group.add_argument("--split-sentences", action="store_true", help="split documents into sentences")
    group.add_argument("--keep-newlines", action="store_true", help="keep the white space after each sentence")
    group = arguments.add_argument_group("tokenizer")
    group.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json, vocabulary, sentencepiece model or folder")
    group.add_argument("--tokenizer-name", choices=TOKENIZER_NAMES, help="LiBai's name for the kind of --vocab-file")
    group.add_argument("--vocab-file", metavar="PATH", help="the vocabulary, or sentencepiece's model")
    group.add_argument("--merges-file", metavar="PATH", default="", help="BPE's merges")
    group.add_argument("--do-lower-case", action="store_true", help="convert to lower case (BERT)")
    group.add_argument("--extra-ids", type=int, default=0, help="number of sentinels to add to the vocabulary")
    group.add_argument("--do-chinese-wwm", action="store_true", help="mark the words of Chinese, found by jieba")
    group.add_argument(
        "--escape-special-tokens", action="store_true", help="read special tokens in documents as plain text"
    )
    group.add_argument("--append-eod", action="store_true", help="end each document with the tokenizer's end token")
    group.add_argument("--eod-token", metavar="TOKEN", default="", help="end each document with this token instead")
    group.add_argument("--bos-token", metavar="TOKEN", default="", help="begin each document with this token")
    group = arguments.add_argument_group("output data")
    group.add_argument("--output-prefix", required=True, metavar="PATH", help="path with which the output files begin")
    group.add_argument(
        "--dataset-impl", choices=["mmap"], default="mmap", help="the only format is the memory-mapped one"
    )
    group = arguments.add_argument_group("runtime")
    group.add_argument("--workers", type=int, default=1, help="processes (default 1), of all machines together")
    group.add_argument(
        "--cluster", choices=CLUSTERS[1:], default="", help="run the processes on the machines of a Ray cluster"
    )
    group.add_argument("--log-interval", type=int, default=100, help="documents between two updates of the bar")
    group.add_argument("--refuse-bad-lines", action="store_true", help="fail if a line has no document")
    return arguments


def tokenizer_files(asked: argparse.Namespace) -> TokenizerFiles:
    """The tokenizer that the arguments name."""
    if bool(asked.tokenizer) == bool(asked.vocab_file):
        raise ConfigError("give the tokenizer by --tokenizer, or by --tokenizer-name and --vocab-file")
    path = Path(asked.tokenizer or asked.vocab_file)
    if asked.tokenizer_name == "T5Tokenizer" and path.suffix != ".model":
        raise ConfigError(f"T5Tokenizer needs a model of sentencepiece (.model), not {path}")
    if asked.tokenizer_name in ("GPT2Tokenizer", "RobertaTokenizer") and not asked.merges_file:
        raise ConfigError(f"{asked.tokenizer_name} needs --merges-file in addition to --vocab-file")
    if asked.tokenizer_name == "BertTokenizer" and path.suffix != ".txt":
        raise ConfigError(f"BertTokenizer needs a vocabulary with one token per line (.txt), not {path}")
    extra_ids = asked.extra_ids or (_EXTRA_IDS_OF_T5 if asked.tokenizer_name == "T5Tokenizer" else 0)
    return TokenizerFiles(
        asked.tokenizer or asked.vocab_file,
        asked.merges_file,
        asked.do_lower_case,
        extra_ids,
        asked.do_chinese_wwm,
        asked.escape_special_tokens,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Preprocess a corpus; returns the exit code: 1 if that failed, 2 if the arguments do not fit."""
    asked = parser().parse_args(argv)

    def lines() -> Iterable[str]:
        given = {"--log-interval": asked.log_interval, "--output-prefix": asked.output_prefix}
        check({"--log-interval": whole(1), "--output-prefix": PATH}, **given)
        if asked.keep_newlines and not asked.split_sentences:
            raise ConfigError("--keep-newlines has an effect only with --split-sentences; give both, or neither")
        task = Task(
            tokenizer_files(asked),
            tuple(asked.json_keys),
            asked.split_sentences,
            asked.keep_newlines,
            asked.append_eod,
            asked.eod_token,
            asked.bos_token,
        )
        with progress_bar(unit="B", unit_scale=True, unit_divisor=1024) as bar:
            documents = bad = shown = 0

            def report_progress(done: int, total: int, report: ShardReport) -> None:
                nonlocal documents, bad, shown
                documents, bad, bar.total = documents + report.documents, bad + len(report.bad), total
                if documents - shown >= asked.log_interval or done >= total:
                    shown = documents
                    bar.set_postfix_str(f"{documents} documents, {bad} bad lines", refresh=False)
                    bar.update(done - bar.n)

            result = preprocess(
                asked.input,
                asked.output_prefix,
                task,
                cutting=Cutting(format=asked.format),
                workers=asked.workers,
                cluster=asked.cluster,
                refuse_bad=asked.refuse_bad_lines,
                progress=report_progress,
            )
        return _summary(result)

    return print_lines("preprocess", lines, of_arguments=ConfigError)


def _summary(result: Preprocessed) -> list[str]:
    lines = [f"{result.documents} documents of {result.characters} characters, {result.empty} empty ones left out"]
    lines += [f"{result.tokens[key]} tokens in {prefix}.bin and .idx" for key, prefix in result.prefixes.items()]
    for what, token in (("begins", result.begin), ("ends", result.end)):
        if token is not None:
            lines.append(f"each document {what} with {token[0]} (id {token[1]})")
    unknown = result.unknown / max(1, sum(result.tokens.values()))
    if unknown > _MOST_UNKNOWN:
        lines.append(f"warning: {unknown:.1%} of the tokens are unknown, such as [UNK]; use a tokenizer for this text")
    if result.kept:
        lines.append(f"{result.kept} shards were kept from an earlier run")
    if result.bad:
        lines.append(f"{result.bad} bad lines, listed in {result.bad_file}")
    return lines
