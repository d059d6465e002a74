from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from libai_data.engine.failure import end_job_on_failure
from tests.deadline import run_to_end

# Each job is a fork, because the imports take longer than all of them.
SCRIPT = """
import atexit, json, os, sys, time
from libai_data.config import LazyCall, instantiate
from libai_data.engine.failure import end_job_on_failure
from libai_data.errors import ConfigError
def broken(a):
    return {}["missing"]
for number, (body, world_size) in enumerate(json.loads(sys.argv[1])):
    job = os.fork()
    if not job:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), descriptor)
        atexit.register(lambda: (print("atexit ran"), time.sleep(0 if world_size == 1 else 100)))
        with end_job_on_failure(rank=0, world_size=world_size):
            exec(body)
        print("went on")
        sys.exit()
    print(os.WEXITSTATUS(os.waitpid(job, 0)[1]), flush=True)
"""
TRACEBACK = "Traceback (most recent call last)"
BROKEN = "ConfigError: The config: calling __main__.broken failed: KeyError: 'missing'"
UNKNOWN = "ConfigError: b: __main__.broken has no argument 'b'."
SLICE = "ConfigError: The config: calling builtins.slice failed: TypeError: slice()"
JOBS: list[tuple[str, int, int, list[str]]] = [
    # Body, ranks, exit code, and what it says once.
    ("raise RuntimeError('broken')", 2, 1, ["rank 0 of 2", TRACEBACK, "RuntimeError: broken"]),
    ("raise KeyboardInterrupt", 2, 130, ["interrupted"]),
    ("sys.exit(3)", 2, 3, []),
]
for _ranks in (1, 2):
    JOBS += [
        *(
            (f"raise ConfigError('no key') from {cause}", _ranks, 1, ["ConfigError: no key"])
            for cause in ("None", "ConfigError('b')")
        ),
        # Of a config error only the traceback of the user's code is shown.
        ("instantiate(LazyCall(broken)(a=1))", _ranks, 1, [BROKEN, TRACEBACK, "in broken"]),
        ("instantiate(LazyCall(broken)(a=1, b=2))", _ranks, 1, [UNKNOWN]),
        ("instantiate(LazyCall(slice)(a=1))", _ranks, 1, [SLICE]),
    ]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each job."""
    folder: Path = tmp_path_factory.mktemp("jobs")
    command = [sys.executable, "-c", SCRIPT, json.dumps([job[:2] for job in JOBS])]
    codes = run_to_end(command, cwd=folder).stdout.split()
    assert len(codes) == len(JOBS)
    texts = [
        [(folder / f"{number}.{name}").read_text() for name in ("stdout", "stderr")] for number in range(len(JOBS))
    ]
    return [(int(code), stdout, stderr) for code, (stdout, stderr) in zip(codes, texts)]


@pytest.mark.parametrize("number", range(len(JOBS)), ids=[f"{job[1]} ranks: {job[0]}" for job in JOBS])
def test_a_rank_that_fails_ends_at_once_and_says_why_once(number: int, ended: list[tuple[int, str, str]]) -> None:
    _, ranks, expected, said = JOBS[number]
    code, stdout, stderr = ended[number]
    assert code == expected
    assert stdout == ("atexit ran\n" if ranks == 1 else "")
    assert [stderr.count(text) for text in said] == [1] * len(said), stderr
    for text in (TRACEBACK, "in broken"):
        assert (text in stderr) == (text in said)
    assert "instantiate.py" not in stderr


def test_a_single_rank_raises_as_usual() -> None:
    with pytest.raises(RuntimeError, match="broken"), end_job_on_failure(0, 1):
        raise RuntimeError("broken")
