from __future__ import annotations

import subprocess
import sys

import pytest

from libai_data.engine.failure import end_job_on_failure

SCRIPT = """
import atexit, sys, time
from libai_data.engine.failure import end_job_on_failure
from libai_data.errors import ConfigError
atexit.register(lambda: (print("atexit ran"), time.sleep(100)))
with end_job_on_failure(rank={rank}, world_size=2):
    {body}
print("went on")
"""


def run(body: str, rank: int = 0) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(body=body, rank=rank)
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


def test_a_config_error_needs_no_traceback() -> None:
    assert "Traceback" not in run("raise ConfigError('unknown key')").stderr


def test_a_single_rank_raises_as_usual() -> None:
    with pytest.raises(RuntimeError, match="broken"), end_job_on_failure(0, 1):
        raise RuntimeError("broken")
