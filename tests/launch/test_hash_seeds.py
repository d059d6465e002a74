"""All ranks of a job have one hash seed, on every machine, whatever the environment of the launcher says."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from libai_data.launch import hosts
from libai_data.launch.launcher import parse_args
from libai_data.launch.restarts import Training
from libai_data.mesh.peers.same_job import hash_of_text, warn_of_hash_seeds
from tests.deadline import run_to_end
from tests.properties import slowly

HASH = "from libai_data.mesh.peers.same_job import hash_of_text; print('hash', hash_of_text())"


@pytest.mark.parametrize(("given", "expected"), [("random", "0"), slowly("", "0"), slowly("7", "7")])
def test_ranks_have_one_hash_seed(given: str, expected: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HASH)
    command = [sys.executable, "-m", "libai_data.launch", "--nproc_per_node", "2", str(script)]
    found = run_to_end(command, 100, env={**os.environ, "PYTHONHASHSEED": given}).stdout.split()
    of_seed = {**os.environ, "PYTHONHASHSEED": expected}
    alone = subprocess.run([sys.executable, "-c", HASH], capture_output=True, text=True, env=of_seed).stdout.split()
    assert found == alone * 2


@pytest.mark.parametrize(("given", "expected"), [("random", "0"), (None, "0"), ("7", "7")])
def test_machines_of_a_hostfile_get_the_hash_seed_of_the_launcher(
    given: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "FORWARDED", ())
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    order = hosts.Hosts(parse_args(["--hostfile", "hosts", __file__]), ["a", "b"], Training())._order(1, [])
    assert order["environment"]["PYTHONHASHSEED"] == expected  # type: ignore[index]


def test_ranks_with_other_hash_seeds_are_named(caplog: pytest.LogCaptureFixture) -> None:
    own = subprocess.run(
        [sys.executable, "-c", HASH], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "12345"}
    ).stdout.split()
    assert own[1] != str(hash_of_text())
    with caplog.at_level(logging.WARNING, logger="libai_data"):
        warn_of_hash_seeds([])
        assert not caplog.messages
        warn_of_hash_seeds([1, 2, 5])
    assert caplog.messages[0].startswith("Rank 1-2 5 has another hash seed than rank 0, so a set of texts has another")
