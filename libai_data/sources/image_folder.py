"""Image files in one folder a class: `<root>/<class>/<name>.png`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator, List, Sequence, Tuple, Union

from libai_data.errors import ConfigError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


class ImageFolderSource:
    """Paths and labels of the images under a folder.

    Classes are the sub-folders in the order of their names (hidden ones left out; one without images keeps its number,
    so that train and test folders agree), labels count from 0 in this order, and images come class by class in the
    order of their paths: the same on every machine.

    Args:
        root: the folder.
        suffixes: endings of file names that are images, in lower case.

    Raises:
        ConfigError: The folder is not there, or holds no image in any class.
    """

    def __init__(self, root: Union[str, Path], suffixes: Sequence[str] = IMAGE_SUFFIXES) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise ConfigError(f"there is no image folder {self.root}; expected {self.root}/<class>/<image>.png")
        self.classes: List[str] = sorted(
            path.name for path in self.root.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
        self._files: List[Tuple[Path, int]] = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted(_files_below(self.root / name))
            if path.suffix.lower() in suffixes
        ]
        if not self._files:
            raise ConfigError(
                f"the image folder {self.root} holds no images ({', '.join(suffixes)}) in sub-folders, one a class"
            )

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Tuple[Path, int]:
        """Path and label of an image."""
        return self._files[index]


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent, name)
