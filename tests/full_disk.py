"""A small file system, so that a test can fill a disk up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """Mount a file system of its own on `folder` until the end of the block; skip the test where that is impossible."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: a full disk. Only root can mount a small file system")
    try:
        _mount("-o", f"size={kilobytes}k", "tmpfs", str(folder))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"NOT TESTED: a full disk. Nothing can be mounted here: {error.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def resize(folder: Path, kilobytes: int) -> None:
    """Give a small disk another size."""
    _mount("-o", f"remount,size={kilobytes}k", "tmpfs", str(folder))


def forbid_writing(folder: Path) -> None:
    """Make a small disk read-only."""
    _mount("-o", "remount,ro", "tmpfs", str(folder))


def fill(folder: Path) -> Path:
    """Take what room there is; returns the file to remove, to give it back."""
    ballast = folder / "ballast"
    with suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", *arguments], check=True, capture_output=True, text=True)
