"""The command: `libai-data convert 'data/*.tar' --to array_record --output data/records`.

It converts records of any format into shards of another, by several processes. A stopped conversion continues.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable

import numpy as np

from libai_data.atomic_files import written_whole
from libai_data.commands.console import print_lines
from libai_data.commands.conversion.shard_writers import FORMATS, schema_of
from libai_data.data.files.identity import key_of
from libai_data.data.progress_bar import progress_bar
from libai_data.data.shard_work.process_pool import Work, WorkError, done_by_processes
from libai_data.data.shard_work.work_folder import check_same_plan, keep_to_plan, own_folder, write_json
from libai_data.data.sources.manifest import MANIFEST, UNFINISHED, Manifest, parsed_manifest
from libai_data.data.sources.opening import SOURCES, open_source, source_format
from libai_data.data.sources.remote import is_remote, without_protocol
from libai_data.data.sources.storage import listed
from libai_data.errors import ConfigError, FormatError, SchemaError, nearest
from libai_data.errors.argument_rules import FILE_NAME, OUTPUT, check, whole

_RECORDS_FOR_SCHEMA = 1000
_NAME = FILE_NAME._replace(
    allowed="a name without '/', and without '.' at its beginning, which would hide the shards",
    accepts=lambda name: FILE_NAME.accepts(name) and name[0] != ".",
)


class ConversionError(WorkError):
    """A process could not write a shard."""


@dataclass(frozen=True)
class Conversion:
    """The records to read, and the shards to write.

    Raises:
        ConfigError: There is no such format, a shard would have no record, the output is no path on this machine, or
            the name has a '/' or begins with '.'.
    """

    paths: Sequence[str]  # files, globs or folders of the records
    to: str  # format of the shards: "array_record", "webdataset" or "parquet"
    output: str | Path  # folder of the shards, "<name>-00000-of-00008.<ending>"
    format: str = ""  # format of the records; by default from the file names
    records_per_shard: int = 100_000  # at most; the sizes of two shards differ by at most one record
    name: str = "records"  # beginning of the shards' file names

    def __post_init__(self) -> None:
        if self.to not in FORMATS:
            raise ConfigError(f"shards cannot be {self.to!r}, only {list(FORMATS)}.{nearest(self.to, FORMATS)}")
        check({"records_per_shard": whole(1), "output": OUTPUT, "name": _NAME}, **vars(self))


@dataclass
class Converted:
    """The result of a conversion: `size` bytes in all, and `kept` shards that an earlier run had finished."""

    paths: list[str] = field(default_factory=list)
    records: int = 0
    size: int = 0
    kept: int = 0


def convert(
    conversion: Conversion, workers: int = 1, progress: Callable[[int, int], None] = lambda done, total: None
) -> Converted:
    """Write the records of a source, in their order, as shards of another format.

    Each shard is read again and compared before it gets its name. If the run ends early, finished shards are kept. The
    same call reads the finished shards again, and writes the missing and damaged ones. If an input file changed, its
    shards are written again. A hidden file in the folder stores the settings of the conversion and the digests of the
    shards.

    Args:
        conversion: the records to read, and the shards to write.
        workers: number of processes.
        progress: called after each shard with the number of finished records, and of all records.

    Raises:
        ConfigError: There are no records, the folder has shards of another conversion, or a shard would overwrite an
            input.
        FormatError: The source cannot be read.
        ConversionError: A process failed: a record cannot be read or written, a shard differs when it is read again,
            or a file of the source changed meanwhile.
    """
    check({"workers": whole(1)}, workers=workers)
    paths = list(conversion.paths)
    asked: Any = paths[0] if len(paths) == 1 else paths
    form = source_format(asked, conversion.format)
    source = open_source(asked, form)
    if not len(source):
        raise ConfigError(f"{paths} contain no record")
    how = {name: value for name, value in asdict(conversion).items() if name not in ("output", "paths", "format")}
    plan = {**how, "records": len(source)}
    output = Path(conversion.output)
    shards = _shards(conversion, len(source))
    _refuse_overwriting(paths, output, shards)
    folder = output / UNFINISHED
    _earlier(output, plan)  # If it is refused, the folder of finished shards must stay as it is.
    with own_folder(folder):
        before = _earlier(output, plan)
        keep_to_plan(folder, plan)
        # Until the run is finished, the folder has one JSON file per finished shard.
        for name, finished in (before.shards if before else {}).items():
            write_json(folder / f"{name}.json", finished)
        (output / MANIFEST).unlink(missing_ok=True)
        schema = schema_of(conversion.to, lambda: source.read_many(range(min(len(source), _RECORDS_FOR_SCHEMA))))
        bounds = [len(source) * number // len(shards) for number in range(len(shards) + 1)]
        jobs = []
        for path, first, stop in zip(shards, bounds, bounds[1:]):
            identity = _input(source, first, stop, schema)
            jobs.append(ShardJob(path, first, stop, identity, _finished(folder, path, identity)))
        reports: dict[str, ShardReport] = {}
        result, done = Converted(shards, len(source)), 0
        progress(done, len(source))
        write = WriteShard(asked, form, conversion.to, schema, str(folder), source.identity)
        work = Work(write, _name, ConversionError)
        for job, (report, is_kept) in done_by_processes(work, jobs, workers):
            result.kept += is_kept
            if _input(source, job.first, job.stop, schema) != job.input:
                raise ConversionError(
                    f"the source of {_name(job)} changed while it was read; run the same command again"
                )
            write_json(_note(folder, job.path), asdict(report))
            reports[job.path] = report
            done += report.records
            progress(done, result.records)
        described = {Path(path).name: asdict(report) for path, report in reports.items()}
        write_json(output / MANIFEST, {"plan": plan, "shards": described})
        result.size = sum(report.size for report in reports.values())
        shutil.rmtree(folder)
    return result


def _input(source: Any, first: int, stop: int, schema: Any) -> str:
    return key_of(source.identity_of(first, stop), str(schema))


def _shards(conversion: Conversion, records: int) -> list[str]:
    count = -(-records // conversion.records_per_shard)
    names = (f"{conversion.name}-{number:05d}-of-{count:05d}" for number in range(count))
    return [str(Path(conversion.output) / f"{name}.{FORMATS[conversion.to].ending}") for name in names]


def _refuse_overwriting(inputs: Sequence[str], output: Path, shards: Sequence[str]) -> None:
    """Refuse shards in a folder of the input, where the next run would read them, or in the place of an input."""
    local = [path for path in inputs if not is_remote(str(path))]
    for folder in filter(os.path.isdir, map(without_protocol, map(str, local))):
        if Path(folder).resolve() in (output.resolve(), *output.resolve().parents):
            raise ConfigError(
                f"the output {output} is in the input folder {folder}, so that its shards would be input, too; give "
                "another folder (--output), or name the input files by a glob"
            )
    there = {os.path.realpath(path) for path in shards if os.path.exists(path)}
    for path in listed(local) if there and local else ():
        if os.path.realpath(path) in there:
            raise ConfigError(
                f"{path} is an input, which a shard would overwrite; give another folder (--output) or another --name"
            )


def _name(job: ShardJob) -> str:
    return f"the shard {job.path} (records {job.first} to {job.stop - 1})"


def _earlier(output: Path, plan: dict[str, Any]) -> Manifest | None:
    """The manifest of an earlier run; refused if the plan is another one, or if shards were moved into subfolders."""
    path = output / MANIFEST
    if not path.exists():
        return None
    before = parsed_manifest(str(path), path.read_bytes())
    check_same_plan(output, before.plan, plan)
    missing = [name for name in before.shards if not (output / name).exists()]
    for path in output.rglob("*") if missing else ():
        if path.name in missing and path.stat().st_size == before.shards[path.name]["size"]:
            raise ConfigError(
                f"{path} was moved here from {output}, so its records would be in the folder twice; move it back, or "
                "give another folder (--output)"
            )
    return before


def _note(folder: Path, path: str) -> Path:
    return folder / f"{Path(path).name}.json"


def _finished(folder: Path, path: str, identity: str) -> ShardReport | None:
    """The report of a shard whose file has its size and whose input did not change; else None."""
    note = _note(folder, path)
    try:
        report = ShardReport(**json.loads(note.read_text("utf-8")))
        if Path(path).stat().st_size == report.size and report.input == identity:
            return report
    except (OSError, ValueError, TypeError):
        pass
    note.unlink(missing_ok=True)
    return None


_AT_ONCE = 256


@dataclass(frozen=True)
class ShardJob:
    """A shard to write: records `first` to `stop`, whose identity is `input`."""

    path: str
    first: int
    stop: int
    input: str = ""
    earlier: ShardReport | None = None  # of an earlier run, whose file is kept if its records are still the same


@dataclass(frozen=True)
class ShardReport:
    """A shard that was written."""

    records: int
    size: int  # bytes
    digest: str  # of the records, as a source returns them
    input: str = ""  # identity of the job's input; if it differs later, the shard is written again


class WriteShard:
    """Writes shards. Each process opens the source once, and checks its identity; unfinished files are in `folder`."""

    def __init__(self, paths: Any, format: str, to: str, schema: Any, folder: str, identity: str) -> None:
        self._paths, self._format, self._to, self._schema, self._folder = paths, format, to, schema, folder
        self._identity = identity
        self._source: Any | None = None

    def __call__(self, job: ShardJob) -> tuple[ShardReport, bool]:
        """Write a shard, read it again to compare it, and then give it its name; or keep the shard of an earlier run.

        Returns its report, and whether it was kept. Raises SchemaError if the format cannot store a record, and
        FormatError if the shard differs when it is read again.
        """
        if job.earlier is not None:
            with suppress(FormatError):
                if self._digest_of_file(Path(job.path)) == job.earlier.digest:
                    return job.earlier, True
        if self._source is None:
            source = open_source(self._paths, self._format)
            if source.identity != self._identity:
                raise FormatError(f"the files of {self._paths} changed since the conversion began; start it again")
            self._source = source
        path = Path(job.path)
        with written_whole(path, Path(self._folder) / f"{path.name}.{os.getpid()}.unfinished") as unfinished:
            written = self._write(unfinished, job)
            try:
                read, why = self._digest_of_file(unfinished), ""
            except FormatError as error:
                read, why = "", f" ({error})"
            if read != written:
                raise FormatError(
                    f"{path}: the shard of records {job.first} to {job.stop} does not read back as it was "
                    f"written{why}; check the disk and the memory of this machine"
                )
        return ShardReport(job.stop - job.first, path.stat().st_size, written, job.input), False

    def _write(self, path: Path, job: ShardJob) -> str:
        digest = hashlib.blake2b(digest_size=16)
        writer = FORMATS[self._to].writer(path, self._schema)
        try:
            for first in range(job.first, job.stop, _AT_ONCE):
                stop = min(first + _AT_ONCE, job.stop)
                try:
                    expected = writer.write(self._source.read_many(range(first, stop)), first)  # type: ignore[union-attr]
                except SchemaError as error:
                    raise SchemaError(f"records {first} to {stop - 1}: {error}") from error
                for record in expected:
                    _update_hash(digest, record)
        finally:
            writer.close()
        return digest.hexdigest()

    def _digest_of_file(self, path: Path) -> str:
        digest = hashlib.blake2b(digest_size=16)
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            # The unfinished name is temporary, so WebDataset's index of it must not stay in the user's cache.
            options = {"cache_dir": folder} if self._to == "webdataset" else {}
            for record in FORMATS[self._to].source([path], **options):
                _update_hash(digest, record)
        return digest.hexdigest()


def _update_hash(digest: Any, value: Any) -> None:
    """Add a record, with all nested values, to a hash."""
    if isinstance(value, (dict, list, tuple)):
        digest.update(f"{type(value).__name__} {len(value)}\n".encode())
        for each in sorted(value.items()) if isinstance(value, dict) else value:
            _update_hash(digest, each)
        return
    if isinstance(value, np.ndarray):
        kind, content = f"{value.dtype}{value.shape}", value.tobytes()
    else:
        kind, content = type(value).__name__, value if isinstance(value, bytes) else repr(value).encode()
    digest.update(f"{kind} {len(content)}\n".encode())
    digest.update(content)


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="libai-data convert", description=__doc__)
    arguments.add_argument("source", nargs="+", help="files, globs (in quotes) or folders of records")
    arguments.add_argument("--to", required=True, choices=list(FORMATS), help="format of the shards")
    arguments.add_argument("--output", required=True, metavar="FOLDER", help="folder to write the shards to")
    arguments.add_argument(
        "--format", choices=list(SOURCES), default="", help="format of the source (default: by file name)"
    )
    arguments.add_argument(
        "--records-per-shard", type=int, default=Conversion.records_per_shard, metavar="N", help="default: %(default)s"
    )
    arguments.add_argument(
        "--name", default=Conversion.name, help="beginning of the file names of the shards (default: %(default)s)"
    )
    arguments.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Convert records; returns the exit code: 1 if that failed."""
    asked = parser().parse_args(argv)

    def lines() -> Iterable[str]:
        conversion = Conversion(asked.source, asked.to, asked.output, asked.format, asked.records_per_shard, asked.name)
        with progress_bar(unit="record", unit_scale=True) as bar:

            def report_progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            result = convert(conversion, asked.workers, report_progress)
        yield (
            f"{result.records} records in {len(result.paths)} shards of {result.size} bytes in all, verified by "
            "reading them again"
        )
        if result.kept:
            yield f"{result.kept} shards were kept from an earlier run"

    return print_lines("convert", lines)
