"""From files of documents to an indexed dataset, by several processes; can resume after an interruption."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable

from libai_data.atomic_files import written_whole
from libai_data.data.files.identity import file_identity
from libai_data.data.shard_work.work_folder import keep_to_plan, own_folder, remove_unfinished
from libai_data.data.sources.indexed_writer import IndexedWriter, dtype_for
from libai_data.data.text.files import find_inputs
from libai_data.data.text.parts import Cutting, Part, cut_into_parts
from libai_data.data.text.ray_tasks import tokenize_on_ray
from libai_data.data.text.shards import ShardReport, Task, finished_shard, shard_prefix, tokenize_parts
from libai_data.errors import ConfigError, DataPipelineError
from libai_data.errors.argument_rules import OUTPUT, check, instance_of, one_of, or_none, whole

CLUSTERS = ("", "ray")
_RULES = {
    "workers": whole(1),
    "cluster": one_of(*CLUSTERS),
    "output_prefix": OUTPUT,
    "task": instance_of(Task),
    "cutting": or_none(instance_of(Cutting)),
}


class BadLines(DataPipelineError, ValueError):
    """There is no document with a token, there are more bad lines than documents, or bad lines are refused."""


@dataclass
class Preprocessed:
    """The result of `preprocess`.

    Args:
        prefixes: key -> path of its `.bin` and `.idx` without their endings.
        documents: number of documents that were written, of at least one key.
        empty: number of documents that were left out, because they have no token or only white space.
        tokens: key -> number of tokens.
        unknown: number of tokens of all keys that stand for what the tokenizer does not know, such as [UNK].
        characters: number of characters of all texts.
        bad: number of lines without a document.
        bad_file: path of the list of these lines, or None if there are none.
        kept: number of shards that an earlier run had finished.
        begin: the token that each document begins with, and its id, or None.
        end: the token that each document ends with, and its id, or None.
    """

    prefixes: dict[str, str]
    documents: int = 0
    empty: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    unknown: int = 0
    characters: int = 0
    bad: int = 0
    bad_file: str | None = None
    kept: int = 0
    begin: tuple[str, int] | None = None
    end: tuple[str, int] | None = None


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    task: Task,
    *,
    cutting: Cutting | None = None,
    workers: int = 1,
    cluster: str = "",
    refuse_bad: bool = False,
    progress: Callable[[int, int, ShardReport], None] = lambda done, total, report: None,
) -> Preprocessed:
    """Tokenize documents into `<output_prefix>_<key>_<level>.bin` and `.idx`; the level is "document" or "sentence".

    The result depends on files, tokenizer and task alone, byte for byte. Finished shards are kept in
    `<output_prefix>.parts` until the result is complete. If the call was interrupted, the same call resumes from them.

    Args:
        inputs: files, globs or folders; see `files.find_inputs`.
        output_prefix: path with which the paths of the results begin.
        task: how documents become tokens.
        cutting: how files become parts.
        workers: processes; with a cluster, on all its machines together.
        cluster: "ray" runs the processes on the processors of Ray, "" on this machine. All machines must have the files
            and the folder of the output under the same paths.
        refuse_bad: raise an error if there is a bad line, and write no result.
        progress: called after each part with the bytes done, all bytes, and the part's report.

    Raises:
        ConfigError: There is no input, an option does not fit, `<output_prefix>.parts` has shards of another corpus, or
            an input changed meanwhile.
        BadLines: There is no document with a token, there are more bad lines than documents, or with `refuse_bad` any
            bad line. The first ones are named.
        TokenizingError: A process failed.
    """
    check(_RULES, workers=workers, cluster=cluster, output_prefix=output_prefix, task=task, cutting=cutting)
    cutting = cutting or Cutting()
    paths, tokenizer = find_inputs(inputs, cutting.format, task.tokenizer.all_files()), task.tokenizer.load()
    cutting = cutting.for_files(paths)
    ends = task.ends(tokenizer)
    folder = Path(f"{output_prefix}.parts")
    with own_folder(folder):
        plan: dict[str, Any] = {**asdict(task), "tokenizer": task.tokenizer.fingerprint(), "format": cutting.format}
        plan.update(part_bytes=cutting.part_bytes, inputs=[file_identity(path) for path in paths])
        keep_to_plan(folder, plan)
        write = tokenize_on_ray if cluster else tokenize_parts
        reports, kept = _tokenized(folder, cutting, paths, lambda parts: write(folder, parts, task, workers), progress)
        changed = [str(path) for path, before in zip(paths, plan["inputs"]) if file_identity(path) != before]
        if changed:
            raise ConfigError(f"inputs changed while they were read: {changed}; remove {folder} and run this again")
        level = "sentence" if task.split_sentences else "document"
        prefixes = {key: f"{output_prefix}_{key}_{level}" for key in task.keys}
        result = _summary(reports, prefixes, kept)
        result.begin, result.end = ((tokenizer.id_to_token(ids[0]), ids[0]) if ids else None for ids in ends)
        bad = _write_bad(_bad_lines(reports), result, Path(f"{output_prefix}.bad_lines"))
        if not result.documents:
            shutil.rmtree(folder)
            raise BadLines(
                f"nothing is written; check --format and --json-keys ({list(task.keys)}). The input contains no "
                f"document with a token: {result.empty} empty ones and {bad}"
            )
        if result.bad > result.documents:
            shutil.rmtree(folder)
            raise BadLines(f"there are more bad lines than documents: {result.documents} documents, and {bad}")
        if refuse_bad and result.bad:
            raise BadLines(bad)
        with ExitStack() as finished_together:
            for number, prefix in enumerate(prefixes.values()):
                remove_unfinished(Path(prefix).parent, f"{Path(prefix).name}.")
                writer = finished_together.enter_context(IndexedWriter(prefix, dtype_for(len(tokenizer))))
                for part in range(len(reports)):
                    writer.add_source(shard_prefix(folder, part, number))
            # At no time may there be files of some keys beside those that an earlier run wrote of others.
            for prefix in prefixes.values():
                Path(f"{prefix}.idx").unlink(missing_ok=True)
        shutil.rmtree(folder)
    return result


def _tokenized(
    folder: Path,
    cutting: Cutting,
    paths: Sequence[Path],
    write: Callable[[Iterable[Part]], Iterable[tuple[Part, ShardReport]]],
    progress: Callable[[int, int, ShardReport], None],
) -> tuple[list[ShardReport], int]:
    """Write the shard of each part that has none yet; returns the reports of all parts, in the corpus's order, and how
    many shards an earlier run had finished."""
    reports: dict[int, ShardReport] = {}
    total, done, kept = sum(map(os.path.getsize, paths)), 0, 0

    def add(part: Part, report: ShardReport) -> None:
        nonlocal done
        reports[part.number] = report
        done += part.cost
        progress(done, total, report)

    def missing() -> Iterator[Part]:
        nonlocal kept
        for part in cut_into_parts(paths, cutting):
            report = finished_shard(folder, part.number)
            if report is None:
                yield part
            else:
                kept += 1
                add(part, report)

    for part, report in write(missing()):
        add(part, report)
    return [reports[number] for number in sorted(reports)], kept


def _summary(reports: Sequence[ShardReport], prefixes: dict[str, str], kept: int) -> Preprocessed:
    names = ("documents", "empty", "unknown", "characters")
    totals = {name: sum(getattr(report, name) for report in reports) for name in names}
    tokens = {key: sum(report.tokens[key] for report in reports) for key in prefixes}
    return Preprocessed(prefixes, tokens=tokens, bad=sum(len(report.bad) for report in reports), kept=kept, **totals)


def _bad_lines(reports: Sequence[ShardReport]) -> Iterator[dict[str, Any]]:
    """Bad lines in the corpus's order: file, line from 1 (0 for the file itself), reason."""
    lines_before: dict[str, int] = {}
    for report in reports:
        bad: dict[int, list[tuple[int, str]]] = {}
        for piece, line, reason in report.bad:
            bad.setdefault(piece, []).append((line, reason))
        for piece, (path, lines) in enumerate(report.pieces):
            before = lines_before.get(path, 0)
            for line, reason in bad.get(piece, ()):
                yield {"file": path, "line": line and before + line, "reason": reason}
            lines_before[path] = before + lines


def _write_bad(bad: Iterator[dict[str, Any]], result: Preprocessed, path: Path) -> str:
    """Write the list of bad lines; returns their number and the first ones, as text."""
    path.unlink(missing_ok=True)
    if not result.bad:
        return "0 bad lines"
    first: list[str] = []
    with written_whole(path) as unfinished, open(unfinished, "w", -1, "utf-8", "backslashreplace") as file:
        for entry in bad:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            if len(first) < 3:
                line = f", line {entry['line']}" if entry["line"] else ""
                first.append(f"{entry['file']}{line}: {entry['reason']}")
    result.bad_file = str(path)
    return f"{result.bad} bad lines, listed in {path}: " + "; ".join(first)
