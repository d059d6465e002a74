"""Image files in one folder for each class: `<root>/<class>/<name>.png`."""

from __future__ import annotations

import hashlib
import logging
import operator
import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.files.identity import by_content, file_identity, key_of, settled
from libai_data.data.files.index_cache import cached_arrays
from libai_data.data.progress_bar import progress_bar
from libai_data.data.sources.packed_names import PackedNames
from libai_data.data.sources.paths import checked_path, why_missing
from libai_data.data.sources.record_index import index_folder
from libai_data.data.sources.remote import is_remote
from libai_data.errors import ConfigError, FormatError
from libai_data.errors.argument_rules import OUTPUT, check, one_of, or_none

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".webp", ".tif", ".tiff"),
    *(".gif", ".ppm", ".pgm", ".pbm", ".pnm"),
)
_RULES = {"cache_dir": or_none(OUTPUT), "nested": one_of("error", "merge")}
# Listing fewer files is fast, so their list is not worth caching.
_FEW_FILES = 20_000


class ImageFolderSource:
    """Paths and labels of the images under a folder.

    Each sub-folder is a class. Hidden folders and files are left out. Images outside of the sub-folders, and files in
    them whose names do not end with one of `IMAGE_SUFFIXES`, are left out with a warning. Classes are numbered from 0
    in the order of their names. A class without images keeps its number, so that train and test folders agree. Images
    are in the order of their classes and paths, which is the same on every machine. A link to a folder counts as a
    folder; each folder counts once per class.

    If there are many files, one process of a node lists them once, with a progress bar. The list is cached and reused
    until a folder changes.

    Args:
        root: the folder.
        cache_dir: folder for the list; by default `indices` in the folder that LIBAI_DATA_CACHE_DIR names.
        nested: if the folder of a class has folders with images, "error" raises an error, and "merge" gives these
            images to the class.

    Attributes:
        root: the folder.
        classes: names of the classes.

    Raises:
        ConfigError: The folder does not exist, has no image in any class or images in nested folders, or has a folder
            that cannot be listed, or a link to no folder.
    """

    def __init__(self, root: str | Path, cache_dir: str | Path | None = None, nested: str = "error") -> None:
        if is_remote(str(root)):
            raise ConfigError(
                f"{root} is a folder of a store, where each image would need its own request; write the images into "
                "shards"
            )
        check(_RULES, cache_dir=cache_dir or None, nested=nested)
        self.root = checked_path("root", root)
        if not os.path.isdir(self.root):
            why = why_missing(self.root)
            raise ConfigError(f"there is no image folder {self.root}{why}; expected {self.root}/<class>/<image>.png")
        self.classes = classes_in(self.root)
        # A cached list is checked by the folders' times only; with identities by content, list the folders again.
        listing = _listing(self.root, self.classes, None if by_content() else _FEW_FILES)
        if listing is None:
            listing = self._kept_listing(index_folder(cache_dir, None, ""))
        self._ends, self._names = listing[0], PackedNames.from_numbers(*listing[1:3])
        if not len(self):
            suffixes = ", ".join(IMAGE_SUFFIXES)
            raise ConfigError(
                f"the image folder {self.root} has no images ({suffixes}) in sub-folders, one for each class"
            )
        inner = self._names.first_with("/")
        if nested == "error" and inner is not None:
            path, label = self[inner]
            raise ConfigError(
                f"{path} is in a folder within the class {self.classes[label]!r} of {self.root}. If that folder is a "
                f"class of its own, give the folder above it as root; to add its images to {self.classes[label]!r}, "
                "set nested='merge'"
            )
        self._warn_of_others(PackedNames.from_numbers(*listing[6:8]))

    @property
    def labels(self) -> np.ndarray:
        """The class number of each image, int64 [images]."""
        return np.searchsorted(self._ends, np.arange(len(self)), side="right")

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[Path, int]:
        """Path and label of an image."""
        name = self._names[index]
        place = operator.index(index) % len(self)
        label = int(np.searchsorted(self._ends, place, side="right"))
        return Path(self.root, self.classes[label], name), label

    def read(self, index: int) -> tuple[bytes, int]:
        """The encoded image in its file, and its label."""
        path, label = self[index]
        # Without O_NONBLOCK, opening a pipe waits for a writer. Reading a device may never end.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FormatError(f"{path} is not an image but a pipe or a device; remove it from the folder")
            return file.read(), label

    def name(self, index: int) -> str:
        """Where an image is, for messages: its path."""
        return str(self[index][0])

    @property
    def identity(self) -> str:
        """The identity of all images as they are now; see `libai_data.data.files.identity`."""
        return self.identity_of(0, len(self))

    def identity_of(self, first: int, stop: int) -> str:
        """The identity of images `first` to `stop` - 1 as they are now; see `file_identity`."""
        has_digests = by_content()
        roots = {label: os.path.realpath(self.root / name) for label, name in enumerate(self.classes)}
        found = hashlib.blake2b(digest_size=12)
        for index in range(first, stop):
            path, label = self[index]
            status = os.lstat(path)
            if has_digests or stat.S_ISLNK(status.st_mode):
                known = file_identity(path)
            else:
                known = [roots[label], self._names[index], status.st_size, settled(status.st_mtime_ns)]
            found.update(repr((label, known)).encode())
        return found.hexdigest()

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint stores to identify the data: the number of images, and a hash of classes and names."""
        digest = hashlib.blake2b(repr(self.classes).encode(errors="surrogateescape"), digest_size=12)
        for numbers in (self._ends, *self._names.numbers()):
            digest.update(numbers.tobytes())
        return {"images": len(self), "names": digest.hexdigest()}

    def _warn_of_others(self, others: PackedNames) -> None:
        """Warn of files that are left out, and name the classes without images that have such files."""
        if not len(others):
            return
        empty = set(np.flatnonzero(np.diff(self._ends, prepend=0) == 0).tolist())
        left = {name.partition("/")[0] for name in others} if empty else set()
        lost = [name for label, name in enumerate(self.classes) if label in empty and name in left]
        logger.warning(
            "%d files in %s are left out, such as %r: they are in no class, or their names do not end with %s.%s",
            len(others),
            self.root,
            others[0],
            ", ".join(IMAGE_SUFFIXES),
            f" So these classes have no images: {lost[:10]}{' and others' * (len(lost) > 10)}." if lost else "",
        )

    def _kept_listing(self, folder: Path) -> list[np.ndarray]:
        def build() -> list[np.ndarray]:
            return _listing(self.root, self.classes) or []

        def is_current(listing: list[np.ndarray]) -> bool:
            times, folders = listing[3], PackedNames.from_numbers(*listing[4:6])
            try:
                return all(os.stat(self.root / each).st_mtime_ns == time for each, time in zip(folders, times))
            except FileNotFoundError:
                return False

        key = key_of("folder 3", os.path.realpath(self.root), IMAGE_SUFFIXES)
        return cached_arrays(folder, key, build, is_current=is_current)


def classes_in(root: Path) -> list[str]:
    """The names of the folders in a folder, in order; a class for each."""
    with _listing_errors(root), os.scandir(root) as entries:
        names = []
        for each in entries:
            if each.name.startswith("."):
                continue
            if each.is_dir():
                names.append(each.name)
            elif not os.path.exists(each.path) and not each.name.lower().endswith(IMAGE_SUFFIXES):
                # Without this folder, the classes after it would have other numbers.
                raise ConfigError(
                    f"{each.path} is a link whose target {os.readlink(each.path)} does not exist; restore the target, "
                    "or remove the link"
                )
        return sorted(names)


def _listing(root: Path, classes: Sequence[str], at_most: int | None = None) -> list[np.ndarray] | None:
    """List the files of all classes, and all folders; without `at_most`, with a progress bar on a terminal.

    Returns:
        Eight int64 vectors: the number of files up to the end of each class, the names of the files within their
        classes (two), the modification time of each folder (ns), the folders within the root (two), and the files
        within the root that are left out (two). None if there are more entries than `at_most`.
    """
    # The time is read before the folder is listed, so a change during the listing is found later.
    folders, times = [""], [settled(os.stat(root).st_mtime_ns)]
    ends, entries = array("q", [0]), 0
    with os.scandir(root) as entries_of_root:
        images = [each for each in entries_of_root if each.name.lower().endswith(IMAGE_SUFFIXES) and each.is_file()]
    others = [each.name for each in images if not each.name.startswith(".")]

    def below(folder: str, seen: set[str]) -> Iterator[str]:
        nonlocal entries
        folders.append(folder)
        inner = []
        with _listing_errors(root / folder):
            times.append(settled(os.stat(root / folder).st_mtime_ns))
            with os.scandir(root / folder) as found:
                for entry in found:
                    if entry.name.startswith("."):
                        continue
                    entries += 1
                    if at_most is not None and entries > at_most:
                        raise _TooManyError
                    path = os.path.join(folder, entry.name)
                    if entry.is_dir():
                        inner.append(path)
                    elif path.lower().endswith(IMAGE_SUFFIXES):
                        yield path
                    else:
                        others.append(path)
        for path in sorted(inner):
            real = os.path.realpath(root / path)
            if real not in seen:
                seen.add(real)
                yield from below(path, seen)

    def names() -> Iterator[str]:
        disable = None if at_most is None else True
        for name in progress_bar(classes, f"Listing {root}", unit=" classes", disable=disable):
            seen = {os.path.realpath(root / name)}
            found = sorted((path[len(name) + 1 :] for path in below(name, seen)), key=lambda path: path.split("/"))
            ends.append(ends[-1] + len(found))
            yield from found

    try:
        packed = PackedNames.of(names())
    except _TooManyError:
        return None
    seen_folders, left_out = PackedNames.of(folders).numbers(), PackedNames.of(sorted(others)).numbers()
    return [np.array(ends[1:]), *packed.numbers(), np.array(times), *seen_folders, *left_out]


class _TooManyError(Exception):
    """The folders have more entries than the limit of the listing."""


@contextmanager
def _listing_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the folder {error.filename or folder} cannot be listed ({error.strerror}); make it readable, or remove it"
        ) from error
