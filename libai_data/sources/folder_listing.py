"""What lies in the folders of classes, listed with a few bytes a file."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from libai_data.errors import ConfigError
from libai_data.identity import settled
from libai_data.sources.packed_names import PackedNames


class TooManyEntries(Exception):
    """A folder has more entries than were to be listed."""


@dataclass(frozen=True)
class FolderListing:
    """Files of `<root>/<class>/`, class by class in the order of their paths.

    Attributes:
        ends: int64 [classes], number of files up to the end of each class.
        names: of the files, as paths within the folders of their classes.
        times: int64 [folders], when each folder has changed last (ns).
        folders: all folders that were listed, as paths within the root.
    """

    ends: np.ndarray
    names: PackedNames
    times: np.ndarray
    folders: PackedNames

    def numbers(self) -> list[np.ndarray]:
        """Six vectors of int64, such as `cached_arrays` keeps."""
        return [self.ends, *self.names.numbers(), self.times, *self.folders.numbers()]

    @classmethod
    def from_numbers(cls, numbers: Sequence[np.ndarray]) -> FolderListing:
        """The listing of which `numbers` made the vectors."""
        ends, name_ends, names, times, folder_ends, folders = numbers
        return cls(
            ends, PackedNames.from_numbers(name_ends, names), times, PackedNames.from_numbers(folder_ends, folders)
        )

    def is_current(self, root: Path) -> bool:
        """Whether no folder has changed since it was listed."""
        try:
            return all(os.stat(root / folder).st_mtime_ns == time for folder, time in zip(self.folders, self.times))
        except FileNotFoundError:
            return False


def list_folder(
    root: Path, classes: Sequence[str], suffixes: tuple[str, ...], at_most: int | None = None
) -> FolderListing:
    """List the files of classes; shows a progress bar on a terminal, unless it is to be short.

    Args:
        root: the folder.
        classes: names of its sub-folders.
        suffixes: endings of the files that count, in lower case.
        at_most: number of entries of any kind after which to stop.

    Raises:
        ConfigError: A folder cannot be listed.
        TooManyEntries: There are more than `at_most`.
    """
    from tqdm import tqdm

    walk = _Walk(root)
    ends = array("q")

    def names() -> Iterator[str]:
        for name in tqdm(classes, f"Listing {root}", unit=" classes", disable=None if at_most is None else True):
            found = [path for path in walk.below(name, at_most) if path.lower().endswith(suffixes)]
            found.sort(key=lambda path: path.split("/"))
            ends.append((ends[-1] if ends else 0) + len(found))
            yield from found

    packed = PackedNames.of(names())
    return FolderListing(np.array(ends, np.int64), packed, np.array(walk.times, np.int64), PackedNames.of(walk.folders))


def folders_in(root: Path) -> list[str]:
    """Names of the sub-folders and of links to such, in their order, hidden ones left out.

    Raises:
        ConfigError: The folder cannot be listed.
    """
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except OSError as error:
        raise _unlisted(root, error) from error


class _Walk:
    """Walks through folders, and notes each with the time of its last change."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._entries = 0
        self.folders = [""]
        # Taken before the folder is listed, so that what changes meanwhile is seen later.
        self.times = [settled(os.stat(root).st_mtime_ns)]

    def below(self, name: str, at_most: int | None) -> Iterator[str]:
        """Paths of the files within a folder, links to folders left out."""
        waiting = [""]
        while waiting:
            inner = waiting.pop()
            folder = os.path.join(name, inner) if inner else name
            try:
                self.folders.append(folder)
                self.times.append(settled(os.stat(self._root / folder).st_mtime_ns))
                with os.scandir(self._root / folder) as entries:
                    for entry in entries:
                        path = f"{inner}/{entry.name}" if inner else entry.name
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(path)
                        else:
                            yield path
                        self._entries += 1
                        if at_most is not None and self._entries > at_most:
                            raise TooManyEntries
            except OSError as error:
                raise _unlisted(self._root / folder, error) from error


def _unlisted(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the folder {folder} cannot be listed ({error.strerror}); make it readable, or take it away")
