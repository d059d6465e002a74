"""What all tests share: the repository's folder, and the check that the tests leave nothing behind."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest
from hypothesis import settings

# A deadline for one example would only measure how busy the machine is.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_MEMORY = Path("/dev/shm")
# Every process that the tests start inherits it, so that it is found even when its parent has died.
MARK = "LIBAI_DATA_TEST_SESSION"
# They live as long as the Python process that uses multiprocessing: here, pytest itself.
EXEMPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
ENDING_SECONDS = 5.0

_shared_memory_before = pytest.StashKey[AbstractSet[object]]()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture(autouse=True)
def environment_is_restored() -> Iterator[None]:
    """Keep what one test sets in the environment from the next one."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before) - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def pytest_sessionstart(session: pytest.Session) -> None:
    os.environ[MARK] = uuid.uuid4().hex
    session.config.stash[_shared_memory_before] = _shared_memory_files()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    deadline = time.monotonic() + ENDING_SECONDS
    while (left := _left_behind(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        print("\nThe tests left behind:\n  " + "\n  ".join(left))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _left_behind(session: pytest.Session) -> list[str]:
    processes = [f"process {pid}: {command}" for pid, command in _processes_of(os.environ[MARK]).items()]
    new_files = _shared_memory_files() - session.config.stash[_shared_memory_before]
    # A file that a live process uses belongs to a program that runs beside the tests, or to a process named above.
    files = [f"file {SHARED_MEMORY / name}" for name in sorted(new_files - _shared_memory_in_use())]
    return processes + files


def _shared_memory_files() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _shared_memory_in_use() -> set[str]:
    used: set[str] = set()
    for process in _process_folders():
        try:
            paths = [
                line.split(maxsplit=5)[5] for line in (process / "maps").read_text().splitlines() if "/dev/" in line
            ]
            paths += [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:  # It ended meanwhile, or is another user's.
            continue
        used.update(Path(path).name for path in paths if path.startswith(f"{SHARED_MEMORY}/"))
    return used


def _processes_of(mark: str) -> dict[int, str]:
    """Live processes, other than this one, that carry the mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found: dict[int, str] = {}
    for process in _process_folders():
        try:
            if int(process.name) == os.getpid() or wanted not in (process / "environ").read_bytes().split(b"\0"):
                continue
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if not any(word in command for word in EXEMPT):
            found[int(process.name)] = command
    return found


def _process_folders() -> list[Path]:
    return [Path("/proc") / name for name in os.listdir("/proc") if name.isdigit()]
