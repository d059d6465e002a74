"""A progress bar never ends the work that it shows."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from libai_data.data.progress_bar import progress_bar
from libai_data.engine.logging_setup import _ConsoleHandler
from tests.deadline import run_to_end

ALL = ("closed", "full", "unread")


@pytest.fixture
def no_output(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Standard error that is closed, on a full disk, or a pipe that nobody reads."""
    if request.param == "closed":
        monkeypatch.setattr(sys, "stderr", None)
        yield None
        return
    if request.param == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    output = os.fdopen(descriptor, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", output)
    yield output
    with suppress(OSError):
        output.close()


@pytest.mark.parametrize("no_output", ALL, indirect=True)
def test_a_bar_that_cannot_be_written_is_left_out(no_output: Any) -> None:
    with progress_bar(total=3, mininterval=0) as bar:
        for _ in range(3):
            bar.update()
    assert bar.n == 3
    assert list(progress_bar(range(3), "Listing", mininterval=0, disable=None)) == [0, 1, 2]


def test_a_bar_is_cleared_before_a_line_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(total=3):
        capsys.readouterr()
        _ConsoleHandler(sys.stderr).emit(logging.LogRecord("x", logging.INFO, "", 0, "a line", (), None))
        assert capsys.readouterr().err.split("a line")[0].strip() == ""


@pytest.mark.parametrize("output", ["2>&-", "2>/dev/full"])
def test_a_command_whose_bar_cannot_be_written_does_its_work(output: str, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(5))
    (tmp_path / "a.jsonl").write_text(lines)
    command = f"{sys.executable} -m libai_data convert a.jsonl --to webdataset --output out {output}"
    done = run_to_end(["bash", "-c", command], cwd=tmp_path)
    assert done.stdout.startswith("5 records in 1 shards")
