"""What all tests share: examples of properties, tests in several processes, and that nothing is left behind."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.deadline import Deadline

# A deadline for one example would only measure how busy the machine is.
settings.register_profile("short", deadline=None, max_examples=8, derandomize=True, database=None)
settings.register_profile("long", deadline=None, max_examples=100, database=None)
settings.load_profile("short")

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_MEMORY = Path("/dev/shm")
# With it, `print` writes a line and its end apart, so that lines of processes with a common pipe get mixed.
os.environ.pop("PYTHONUNBUFFERED", None)
# Every process that the tests start inherits it, so that it is found even when its parent has died. The mark of a
# worker of xdist begins with the mark of the process that started it.
MARK = "LIBAI_DATA_TEST_SESSION"
# They live as long as the Python process that uses multiprocessing: here, pytest itself.
EXEMPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
ENDING_SECONDS = 30.0
# Files of tests/distributed that start jobs of their own and mostly wait for their ends, in groups that take equally
# long in the long run. The others share a pool.
STARTS_JOBS = {
    "test_different_places.py": "jobs",
    "test_faults.py": "jobs",
    "test_full_disk.py": "jobs",
    "test_interrupted_training.py": "more jobs",
    "test_launch_hosts.py": "jobs",
    "test_own_loop.py": "jobs",
    "test_streaming.py": "streams",
    "test_two_nodes.py": "jobs",
}
LONG = ("distributed", "data/sources", "loader", "docs", "engine", "commands", "data/text")

_shared_memory_before = pytest.StashKey[AbstractSet[object]]()
_temporary_folder = pytest.StashKey[Path]()
_deselected = pytest.StashKey[int]()
_left_by_workers: pytest.StashKey[Any] = pytest.StashKey()
_skipped: pytest.StashKey[Any] = pytest.StashKey()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture(autouse=True)
def environment_is_restored() -> Iterator[None]:
    """Keep what one test sets for its process from the next one: the environment, signals, and where messages go."""
    before = dict(os.environ)
    handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    yield
    for signum, handler in handlers.items():
        if signal.getsignal(signum) != handler:
            signal.signal(signum, handler)  # `launch`, in this process, forwards signals until the process ends.
    if "oneflow" in sys.modules:
        # Its threads read the environment whenever they compute, which crashes while it is changed.
        sys.modules["oneflow"]._oneflow_internal.eager.Sync()
    logging.getLogger("libai_data").propagate = True
    for name in set(os.environ) - set(before) - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@pytest.fixture(scope="session", autouse=True)
def ranks_end_with_the_tests() -> Iterator[None]:
    """End the ranks that wait for more scripts."""
    yield
    if "tests.distributed.pool" in sys.modules:
        sys.modules["tests.distributed.pool"].close_pools()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[_deselected] = 0
    gc.disable()  # Until all is collected: each full collection goes over every test that is found.
    config.stash[_left_by_workers] = []
    config.stash[_skipped] = []
    if _is_worker(config):
        return
    # A shell lets what it starts in the background ignore Ctrl-C, and all that is started there inherits it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # What the tests leave in a temporary folder of their own is theirs, and goes with it.
    folder = Path(tempfile.mkdtemp(prefix="tests-"))
    folder.chmod(0o755)  # Some tests act as another user.
    config.stash[_temporary_folder] = folder
    os.environ["TMPDIR"] = str(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    tempfile.tempdir = None
    if config.option.basetemp is None:
        config.option.basetemp = str(folder / "pytest")


def pytest_sessionstart(session: pytest.Session) -> None:
    os.environ[MARK] = f"{os.environ.get(MARK, '')}/{uuid.uuid4().hex}"
    session.config.stash[_shared_memory_before] = _shared_memory_files()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        slow[0].config.stash[_deselected] += len(slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give out files whole, and those that start ranks to few processes, so that few ranks compete."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            if "distributed/" not in file:
                return file
            return STARTS_JOBS.get(Path(file).name, "pool")

        def remove_node(self, node: Any) -> str | None:
            """Hand on what a process that died has left, but not the test that ended it, which would end the next."""
            workload = self.assigned_work.pop(node)
            left = [(scope, test) for scope, tests in workload.items() for test, done in tests.items() if not done]
            if not left:
                return None
            scope, fatal = left[0]
            workload[scope][fatal] = True
            self.workqueue.update({scope: workload[scope] for scope, test in left if test != fatal})
            for other in self.assigned_work:
                self._reschedule(other)
            return str(fatal)

    config.option.loadscopereorder = False  # The order is that of pytest_collection_modifyitems.
    return ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long, so that at the end no process waits for another."""
    folders = [f"{REPOSITORY / 'tests' / name}{os.sep}" for name in LONG]

    def place(item: pytest.Item) -> tuple[int, bool]:
        path = str(item.path)
        folder = next((place for place, folder in enumerate(folders) if path.startswith(folder)), len(folders))
        # Each group of ranks in one piece.
        return folder, folder == 0 and item.path.name not in STARTS_JOBS

    items.sort(key=place)


def pytest_collection_finish() -> None:
    # What is imported stays. With it, each full collection, of which tests ask for hundreds, would take 0.2 s.
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    output = getattr(node, "workeroutput", {})
    node.config.stash[_left_by_workers] += output.get("left", [])
    node.config.stash[_deselected] = max(node.config.stash[_deselected], output.get("deselected", 0))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    torch = sys.modules.get("torch.distributed.nn.jit.instantiator")
    if torch is not None:  # It keeps a folder until the process ends.
        torch._TEMP_DIR.cleanup()
    gc.collect()  # A loader in a reference cycle ends with it, and its workers with the loader.
    deadline = Deadline(ENDING_SECONDS)
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        # A worker that was killed has not ended what its tests started, and this would write into the temporary folder.
        while (running := _processes_of(os.environ[MARK])) and not deadline.has_passed:
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        return
    while (left := _left_behind(session)) and not deadline.has_passed:
        time.sleep(0.1)
    if _is_worker(session.config):
        session.config.workeroutput.update(left=left, deselected=session.config.stash[_deselected])  # type: ignore[attr-defined]
        return
    left += session.config.stash[_left_by_workers]
    if left:
        print("\nThe tests left behind:\n  " + "\n  ".join(left))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reasons = {report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])}
    config.stash[_skipped] = sorted(reason.removeprefix("Skipped: ") for reason in reasons)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _is_worker(config):
        return
    folder = config.stash[_temporary_folder]
    for mounted in {line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()}:
        if mounted.startswith(f"{folder}/"):  # by a test whose process was killed
            subprocess.run(["umount", "--lazy", mounted], check=False)
    shutil.rmtree(folder, ignore_errors=True)
    if config.stash[_skipped]:
        print(f"Not tested on this machine: {'; '.join(config.stash[_skipped])}")
    if config.stash[_deselected]:
        print(
            f"Not run: {config.stash[_deselected]} slow tests, and most examples of the properties; "
            "`make test-all` runs everything"
        )


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _left_behind(session: pytest.Session) -> list[str]:
    processes = [f"process {pid}: {command}" for pid, command in _processes_of(os.environ[MARK]).items()]
    new_files = _shared_memory_files() - session.config.stash[_shared_memory_before]
    # A file that a live process uses belongs to a program that runs beside the tests, or to a process named above.
    files = [f"file {SHARED_MEMORY / name}" for name in sorted(new_files - _shared_memory_in_use())]
    temporary = session.config.stash.get(_temporary_folder, None)
    if temporary is not None:
        files += [f"file {path}" for path in sorted(temporary.iterdir()) if path.name not in ("pytest", "cache")]
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
    """Live processes, other than this one, whose mark begins with `mark`."""
    wanted = f"{MARK}={mark}".encode()
    found: dict[int, str] = {}
    for process in _process_folders():
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            if int(process.name) == os.getpid() or not any(entry.startswith(wanted) for entry in environment):
                continue
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if not any(word in command for word in EXEMPT):
            found[int(process.name)] = command
    return found


def _process_folders() -> list[Path]:
    return [Path("/proc") / name for name in os.listdir("/proc") if name.isdigit()]
