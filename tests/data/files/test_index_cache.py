"""Cached indices: one process builds, the others wait, fail with it, or take over when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.data.datasets.gpt import GPTDataset
from libai_data.data.files.index_cache import cached_arrays
from libai_data.errors import ConfigError
from tests.data.datasets.gpt_corpora import write
from tests.deadline import printed_by, wait_for_a_lock
from tests.full_disk import fill, resize, small_disk
from tests.pipes import next_line

REPOSITORY = Path(__file__).resolve().parents[4]

# Says when it builds, and then does as it is told on its standard input.
PROCESS = """
import sys
from pathlib import Path

import numpy as np

from libai_data.data.files.index_cache import cached_arrays


def build():
    print("building", flush=True)
    if sys.stdin.readline().strip() == "fail":
        raise MemoryError("too large")
    return [np.arange(5), np.arange(0), np.arange(3)]


print("asking", flush=True)
try:
    print([array.tolist() for array in cached_arrays(Path(sys.argv[1]), "key", build)], flush=True)
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""
ARRAYS = "[[0, 1, 2, 3, 4], [], [0, 1, 2]]"


def start(folder: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", PROCESS, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def line(process: subprocess.Popen[str]) -> str:
    return next_line(process).strip()


def tell(process: subprocess.Popen[str], what: str) -> None:
    assert process.stdin is not None
    process.stdin.write(what + "\n")
    process.stdin.flush()


def one_builds_others_wait(folder: Path) -> list[subprocess.Popen[str]]:
    builder = start(folder)
    assert [line(builder), line(builder)] == ["asking", "building"]
    others = [start(folder) for _ in range(2)]
    assert [line(process) for process in others] == ["asking"] * 2
    for process in others:
        wait_for_a_lock(process)
    return [builder, *others]


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    found = [printed_by(process)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return found


def test_one_process_builds_while_others_wait_for_its_arrays(tmp_path: Path) -> None:
    processes = one_builds_others_wait(tmp_path)
    tell(processes[0], "go on")
    assert ended(processes) == [ARRAYS] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key.lock", "key.npy"]


def test_who_waits_fails_if_the_builder_fails_and_a_later_job_builds_anew(tmp_path: Path) -> None:
    processes = one_builds_others_wait(tmp_path)
    tell(processes[0], "fail")
    builder, *others = ended(processes)
    assert builder == "MemoryError: too large"
    for other in others:
        assert other.startswith("PeerError:") and other.endswith("has failed: MemoryError: too large")
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    later = start(tmp_path)
    tell(later, "go on")
    assert ended([later]) == [f"asking\nbuilding\n{ARRAYS}"]


def test_another_process_builds_if_the_builder_is_killed(tmp_path: Path) -> None:
    builder, *others = one_builds_others_wait(tmp_path)
    builder.send_signal(signal.SIGKILL)
    printed_by(builder)
    for process in others:
        tell(process, "go on")
    found = sorted(ended(others))
    assert found == [ARRAYS, f"building\n{ARRAYS}"]


def test_a_broken_file_is_built_anew_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> list[np.ndarray]:
        return [np.arange(100)]

    cached_arrays(tmp_path, "key", build)
    path = tmp_path / "key.npy"
    whole = path.read_bytes()
    for broken in (whole[:-8], whole[:50], b"", whole[:128] + b"\xff" * 16 + whole[144:]):
        path.write_bytes(broken)
        caplog.clear()
        assert cached_arrays(tmp_path, "key", build)[0].tolist() == list(range(100))
        assert "built again" in caplog.text
        assert path.read_bytes() == whole


def arrays_and_warnings(folder: Path, caplog: pytest.LogCaptureFixture) -> int:
    """Ask for two indices that cannot be kept; returns the number of warnings."""
    for key in ("a", "b"):
        for _ in range(2):
            found = cached_arrays(folder, key, lambda: [np.arange(100_000), np.arange(3)])
            assert [array.tolist() for array in found] == [list(range(100_000)), [0, 1, 2]]
            assert not any(array.flags.writeable for array in found)
    return caplog.text.count(f"No index can be kept in {folder}")


def test_an_index_in_a_folder_without_permission_is_built_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    # Not even root may make folders here.
    assert arrays_and_warnings(Path("/sys/kernel/indices"), caplog) == 1
    assert "LIBAI_DATA_CACHE_DIR" in caplog.text


def test_an_index_that_the_disk_has_no_room_for_is_built_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 256) as disk:
        assert arrays_and_warnings(disk, caplog) == 1
        assert {path.suffix for path in disk.iterdir()} == {".lock"}
        fill(disk)
        assert arrays_and_warnings(disk / "new", caplog) == 1
        resize(disk, 4096)
        assert len(cached_arrays(disk, "a", lambda: [np.arange(100_000)])) == 1
        assert (disk / "a.npy").exists()


@pytest.mark.parametrize("is_full_before", [True, False])
def test_processes_build_at_the_same_time_what_the_disk_has_no_room_for(tmp_path: Path, is_full_before: bool) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        (disk / "key.lock").touch()
        if is_full_before:
            fill(disk)
            processes = [start(disk) for _ in range(3)]
        else:
            processes = one_builds_others_wait(disk)
            fill(disk)
            tell(processes[0], "go on")
        builders = processes if is_full_before else processes[1:]
        for process in builders:
            assert [line(process) for _ in range(1 + is_full_before)][-1] == "building"
        for process in builders:
            tell(process, "go on")
        assert ended(processes) == [ARRAYS] * 3


def test_the_reason_why_an_index_cannot_be_built_is_kept_on_a_full_disk(tmp_path: Path) -> None:
    def build() -> list[np.ndarray]:
        raise ValueError("the corpus is broken")

    with small_disk(tmp_path / "disk", 64) as disk:
        fill(disk)
        with pytest.raises(ValueError, match="the corpus is broken"):
            cached_arrays(disk, "key", build)


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="set cache_dir to another folder"):
        cached_arrays(tmp_path / "file", "key", list)


def test_an_index_is_used_again_by_those_it_fits_alone(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3], [4, 5]])

    def files(**options: Any) -> int:
        GPTDataset(prefix, **{"max_seq_length": 2, **options})
        return len(list((tmp_path / "a.cache").glob("*.npy"))) if (tmp_path / "a.cache").exists() else 0

    assert files() == 0  # the order of the files needs no index
    assert files(shuffle_documents=True) == 1
    assert files(shuffle_documents=True, max_seq_length=1, reset_position_ids=True) == 1  # of no other documents
    assert files(shuffle_documents=True, seed=2) == 2
    assert files(shuffle_documents=True, num_epochs=2) == 3
    assert files(eod_mask_loss=True) == 4
    assert files(packing=True) == 5
    assert files(packing=True, max_seq_length=3) == 6
    write(prefix, [[1, 2], [3, 4, 5]])
    assert files(shuffle_documents=True) == 7
    GPTDataset(prefix, 2, packing=True, cache_dir=tmp_path / "elsewhere")
    assert len(list((tmp_path / "elsewhere").glob("*.npy"))) == 1
