"""How fast the dataset's storage is: its files past the system's cache, and samples by the dataset itself."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from libai_data.config import try_get_key
from libai_data.doctor.examined import Examined
from libai_data.doctor.findings import OK, WARNING, Facts, Finding, Reports
from libai_data.in_words import bytes_in_words, numbers_in_words
from libai_data.loader.failures import ErrorPolicy
from libai_data.loader.reading import SampleReader

NAME = "storage"

_SECONDS = 0.5
_BYTES = 64 << 20
_CHUNK = 1 << 20
_FEW_BYTES = 1 << 18
_MOST_FILES = 1000
_SAMPLES = 2000
_SLOW = 10.0
"""How many times slower than the usual rank is worth a warning."""

_FAST_ENOUGH = 200e6
"""Bytes a second, as a local disk has them."""


class OpenedFiles:
    """Notes which files this process opens from now on. There is no way to stop it, so that one is made a process."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)) and len(self.paths) < _MOST_FILES:
            path = os.path.abspath(os.fspath(arguments[0]))
            if not path.startswith(("/proc/", "/sys/", "/dev/", sys.prefix)) and not path.endswith((".py", ".pyc")):
                self.paths.add(path)


def examine(examined: Examined) -> Facts:
    """Read samples for a moment, and then the files that this opened."""
    if not examined.reads or not hasattr(examined.dataset, "__len__"):
        return {}
    opened = OpenedFiles()
    rate = _samples_a_second(examined.dataset)
    files = [path for path in opened.paths if os.path.isfile(path)] + list(_named_files(examined.cfg))
    files.sort(key=os.path.getsize, reverse=True)
    facts: Facts = {"samples/s": rate}
    if files:
        size, seconds = read_past_cache(files)
        facts.update(path=files[0], kind=kind_of(files[0]), bytes=size, seconds=seconds)
    return facts


def _samples_a_second(dataset: Any) -> float:
    reader = SampleReader(dataset, 0, ErrorPolicy("raise", None))
    indices = np.random.default_rng(0).integers(0, len(dataset), _SAMPLES).tolist()
    start, count = time.perf_counter(), 0
    while count < _SAMPLES and time.perf_counter() - start < _SECONDS:
        reader.sample(0, indices[count])
        count += 1
    return count / (time.perf_counter() - start)


def _named_files(cfg: Any) -> Iterable[str]:
    """Files that the dataset's config names: some readers open theirs without Python's knowing."""
    datasets = try_get_key(cfg, "dataloader.train.dataset")
    for dataset in datasets if isinstance(datasets, (list, tuple)) else [datasets]:
        for value in dataset.values() if hasattr(dataset, "values") else ():
            if isinstance(value, (str, Path)) and os.path.isfile(value):
                yield os.path.abspath(value)


def read_past_cache(files: Iterable[str]) -> tuple[int, float]:
    """Read files until half a second or 64 MB are over, having the system forget what it keeps of them.

    Returns:
        Bytes, and seconds that they took.
    """
    total, start = 0, time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while chunk := file.read(_CHUNK):
                total += len(chunk)
                if total >= _BYTES or time.perf_counter() - start > _SECONDS:
                    return total, time.perf_counter() - start
    return total, time.perf_counter() - start


def kind_of(path: str) -> str:
    """Type of the file system that holds a file, such as "ext4" or "nfs4"; see proc(5) on mountinfo."""
    held: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        # Spaces in names are written as \040.
        held[fields.split()[4].encode().decode("unicode_escape")] = rest.split()[0]
    folder = Path(os.path.realpath(path))
    return next((held[str(each)] for each in (folder, *folder.parents) if str(each) in held), "unknown")


def judge(reports: Reports) -> list[Finding]:
    """Compare the ranks: what is fast enough depends on the model, but all should be about as fast."""
    facts = reports.facts(NAME)
    if not facts:
        return []
    found = []
    rates = {rank: float(each["samples/s"]) for rank, each in facts.items()}
    speeds = {
        rank: each["bytes"] / each["seconds"] for rank, each in facts.items() if each.get("bytes", 0) > _FEW_BYTES
    }
    for what, values, enough, words in (
        ("samples", rates, float("inf"), lambda value: f"{value:,.0f} samples/s"),
        ("files", speeds, _FAST_ENOUGH, lambda value: f"{bytes_in_words(value)}/s"),
    ):
        usual = median(values.values()) if values else 0.0
        slow = [rank for rank, value in values.items() if value < min(usual / _SLOW, enough)]
        if slow:
            found.append(
                Finding(
                    WARNING,
                    f"rank {numbers_in_words(slow)} reads {what} at {words(min(values[rank] for rank in slow))}, where "
                    f"{words(usual)} are usual",
                    "all ranks wait for the slowest: look at its node's disk and network, or copy the data there",
                )
            )
    if found:
        return found
    kinds = sorted({f"{each['kind']}" for each in facts.values() if "kind" in each})
    raw = f"; files ({', '.join(kinds)}) at {bytes_in_words(min(speeds.values()))}/s" if speeds else ""
    few = f"; files ({', '.join(kinds)}) too small to time" if kinds and not speeds else ""
    return [Finding(OK, f"one process reads {min(rates.values()):,.0f} samples/s{raw}{few}, on the slowest rank")]
