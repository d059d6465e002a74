"""If a process may open too few files, the error names the limit and the remedy."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from libai_data import DataLoader
from libai_data.data.shard_work.process_pool import Work, done_by_processes
from libai_data.data.sources import ArrayRecordSource
from libai_data.launch.ports import free_port, reserve_port
from tests.data.sources.record_files import available, write
from tests.deadline import run_to_end

_MESSAGE = r"this process may have \d+ open files.*run `ulimit -n 65536` before the program, or use fewer workers"


@pytest.fixture
def no_more_files() -> Iterator[None]:
    """Let this process open no more files than it has open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    Path("/dev/null").read_bytes()  # Modules that this needs are imported.
    descriptor = os.open("/dev/null", os.O_RDONLY)
    os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_records_that_cannot_be_opened_are_not_called_damaged(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    available("array_record")
    write("array_record", tmp_path / "a.array_record", ["text"])
    assert len(ArrayRecordSource(tmp_path)) == 1
    write("array_record", tmp_path / "b.array_record", ["text"])
    request.getfixturevalue("no_more_files")
    with pytest.raises(OSError, match=_MESSAGE):
        ArrayRecordSource([tmp_path / "b.array_record"])


@pytest.mark.usefixtures("no_more_files")
def test_a_loader_that_cannot_start_its_workers_names_the_limit_of_open_files() -> None:
    with pytest.raises(OSError, match=_MESSAGE):
        next(iter(DataLoader(list(np.arange(8)), batch_size=2, num_workers=2)))


@pytest.mark.usefixtures("no_more_files")
def test_work_that_cannot_start_its_processes_names_the_limit_of_open_files() -> None:
    with pytest.raises(OSError, match=_MESSAGE):
        list(done_by_processes(Work(len, str), ["job"], 1))


def test_a_port_that_cannot_be_tried_is_not_called_in_use(request: pytest.FixtureRequest) -> None:
    port = free_port()
    request.getfixturevalue("no_more_files")
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit + 1, hard_limit))  # for the socket that reserves the port
    with pytest.raises(OSError, match="Too many open files"):
        reserve_port(port)


def test_a_launcher_that_cannot_start_its_ranks_names_the_limit_of_open_files() -> None:
    launch = f"ulimit -n 16; exec {sys.executable} -m libai_data.launch --nproc_per_node 8 -m this"
    ended = run_to_end(["bash", "-c", launch])
    assert ended.returncode == 1
    assert re.search(_MESSAGE, ended.stderr), ended.stderr
