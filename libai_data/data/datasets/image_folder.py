"""Labelled images from a folder, as an image classifier wants them."""

from __future__ import annotations

from pathlib import Path

from libai_data.data.datasets.labelled_images import LabelledImages, Transform
from libai_data.data.sources.image_folder import ImageFolderSource


class ImageFolderDataset(LabelledImages):
    """Images of `<root>/<class>/<name>.png` with their class numbers.

    Args:
        root: the folder.
        transform: from an image to an array; see `LabelledImages`.
        mode: "RGB", "L" for greyscale, or another of Pillow's modes to convert to.
        cache_dir: for the list of a large folder's files; see `ImageFolderSource`.

    Raises:
        ConfigError: The folder is not there, holds no images, or cannot be listed.
    """

    def __init__(
        self,
        root: str | Path,
        transform: Transform | None = None,
        mode: str = "RGB",
        cache_dir: str | Path | None = None,
    ) -> None:
        super().__init__(ImageFolderSource(root, cache_dir=cache_dir), transform, mode)
