from __future__ import annotations

import subprocess
import sys

import pytest

from libai_data.engine.failure import end_job_on_failure
from tests.properties import slowly

SCRIPT = """
import atexit, sys, time
from libai_data.engine.failure import end_job_on_failure
from libai_data.errors import ConfigError
def broken(a):
    return {{}}["missing"]
atexit.register(lambda: (print("atexit ran"), time.sleep({wait})))
with end_job_on_failure(rank={rank}, world_size={world_size}):
    {body}
print("went on")
"""


def run(body: str, rank: int = 0, world_size: int = 2) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(body=body, rank=rank, world_size=world_size, wait=0 if world_size == 1 else 100)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("raise RuntimeError('broken')", 1, ["rank 0 of 2", "Traceback", "RuntimeError: broken"]),
        ("raise KeyboardInterrupt", 130, ["interrupted"]),
        ("sys.exit(3)", 3, []),
        ("raise ConfigError('unknown key')", 1, ["ConfigError: unknown key"]),
    ],
)
def test_a_rank_that_fails_ends_at_once_and_says_why_once(body: str, code: int, said: list[str]) -> None:
    result = run(body)
    assert result.returncode == code
    assert "atexit ran" not in result.stdout
    for text in said:
        assert result.stderr.count(text) == 1


@pytest.mark.parametrize("world_size", [slowly(1), 2])
@pytest.mark.parametrize("cause", ["None", "ConfigError('b')"])
def test_a_config_error_needs_no_traceback(world_size: int, cause: str) -> None:
    result = run(f"raise ConfigError('unknown key') from {cause}", world_size=world_size)
    assert result.returncode == 1
    assert "ConfigError: unknown key" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("world_size", [slowly(1), 2])
@pytest.mark.parametrize(
    ("call", "error", "has_traceback"),
    [
        ("LazyCall(broken)(a=1)", "ConfigError: The config: calling __main__.broken failed: KeyError: 'missing'", True),
        ("LazyCall(broken)(a=1, b=2)", "ConfigError: b: __main__.broken takes no argument 'b'.", False),
        ("LazyCall(slice)(a=1)", "ConfigError: The config: calling builtins.slice failed: TypeError: slice()", False),
    ],
)
def test_of_a_config_error_only_the_traceback_of_the_users_code_is_shown(
    world_size: int, call: str, error: str, has_traceback: bool
) -> None:
    body = f"from libai_data.config import LazyCall, instantiate; instantiate({call})"
    result = run(body, world_size=world_size)
    assert result.stderr.count(error) == 1
    assert ("in broken" in result.stderr) == ("Traceback" in result.stderr) == has_traceback
    assert "instantiate.py" not in result.stderr


def test_a_single_rank_raises_as_usual() -> None:
    with pytest.raises(RuntimeError, match="broken"), end_job_on_failure(0, 1):
        raise RuntimeError("broken")
