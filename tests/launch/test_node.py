"""The launcher of a node of a hostfile: what it waits for before it starts its ranks."""

from __future__ import annotations

import os
import threading
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
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(node.wait_for_predecessor(job)))
    thread.start()
    assert told.wait(stretched(30))
    predecessor.close()
    thread.join()
    found[0].close()
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
