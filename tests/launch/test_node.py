"""The launcher of a node of a hostfile: what it waits for before it starts its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from libai_data.launch import node
from tests.deadline import stretched


def test_who_holds_the_name_of_the_job_is_said_at_once_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    job = f"test-{os.getpid()}"
    said: list[str] = []
    predecessor = node.wait_for_predecessor(job)
    told = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        told.set()

    monkeypatch.setattr(node, "say", say)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(node.wait_for_predecessor, job)
        assert told.wait(stretched(30))
        predecessor.close()
        waiting.result().close()
    (line,) = said
    assert f"(process {os.getpid()} uses the socket name @libai_data.launch/{os.getuid()}/{job})" in line


def test_a_name_that_is_not_given_back_is_an_error_that_names_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    job = f"test-{os.getpid()}"
    monkeypatch.setattr(node, "_SECONDS_FOR_PREDECESSOR", 0.0)
    with (
        node.wait_for_predecessor(job),
        pytest.raises(TimeoutError, match=rf"\(process {os.getpid()} uses the socket name @.*/{job}\)"),
    ):
        node.wait_for_predecessor(job)


def end_of_node(told: str) -> tuple[str, int]:
    """What a launcher of a node writes, and its exit code, if it gets these lines and its stdin stays open."""
    command = [sys.executable, "-m", "libai_data.launch.node"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, bufsize=1, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(told)
        return process.stdout.read(), process.wait()


def test_a_node_does_not_wait_for_a_rank_0_whose_machine_has_left(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('here')")
    # An address for documentation, which no machine has.
    arguments = ["--nnodes", "2", "--node_rank", "1", "--master_addr", "192.0.2.1", "--master_port", "23456"]
    order = {"job": f"test-{os.getpid()}", "environment": {}, "arguments": [*arguments, str(script)]}
    assert end_of_node(f"{json.dumps(order)}\nleft node-a\n") == ("here\n", 0)


def test_a_login_shell_that_reads_the_order_is_named() -> None:
    output, code = end_of_node("alive\n")
    assert "got 'alive' instead of its order: the login shell of this machine reads stdin" in output and code == 1
