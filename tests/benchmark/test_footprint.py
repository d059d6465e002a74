"""Memory and descriptors are those that the process holds."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from libai_data.benchmark.footprint import descriptors, private_beyond, resident


def test_own_memory_is_counted_and_a_mapped_data_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(16_000_000))
    before = private_beyond(os.getpid(), str(tmp_path))
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.sum() > 0
    assert private_beyond(os.getpid(), str(tmp_path)) - before < 4
    own = mmap.mmap(-1, 16_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    np.frombuffer(own, np.uint8)[...] = 1
    assert private_beyond(os.getpid(), str(tmp_path)) - before > 14


def test_pages_of_a_data_file_that_a_process_copies_for_itself_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(16_000_000))
    before = private_beyond(os.getpid(), str(tmp_path))
    copied = np.memmap(path, np.uint8, "c")
    copied[...] = 1
    assert private_beyond(os.getpid(), str(tmp_path)) - before > 14


def test_resident_memory_grows_with_what_is_touched() -> None:
    before = resident(os.getpid())
    own = mmap.mmap(-1, 16_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    np.frombuffer(own, np.uint8)[...] = 1
    assert resident(os.getpid()) - before > 14


def test_open_descriptors_are_counted() -> None:
    before = descriptors(os.getpid())
    first, second = os.pipe()
    assert descriptors(os.getpid()) == before + 2
    os.close(first)
    os.close(second)
