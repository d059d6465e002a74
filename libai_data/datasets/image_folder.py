"""Labelled images from a folder, as an image classifier wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, List, Optional, Tuple, Union

from PIL import Image

from libai_data.sample_random import seeded_globals
from libai_data.sources.image_folder import ImageFolderSource
from libai_data.structures import DistTensorData, Instance
from libai_data.transforms.image import ImageToFloat
from libai_data.transforms.stages import transform_stages
from libai_data.transforms.timing import transform_time


class ImageFolderDataset:
    """Images of `<root>/<class>/<name>.png` with their class numbers.

    Args:
        root: the folder.
        transform: from a Pillow image to an array; by default float32 [C, H, W] of 0 to 1. Random transforms may draw
            from `sample_generator`, `random` or `numpy.random`: all are seeded for the sample.
        mode: Pillow's mode to convert to, such as "RGB" or "L".

    Raises:
        ConfigError: The folder is not there, or holds no images.
    """

    def __init__(
        self, root: Union[str, Path], transform: Optional[Callable[[Any], Any]] = None, mode: str = "RGB"
    ) -> None:
        self.source = ImageFolderSource(root)
        self.transform = ImageToFloat() if transform is None else transform
        self.mode = mode

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Instance:
        """Instance of `images` (first stage) and `labels` (int64 [], last stage)."""
        image, label = self._open(index)
        with seeded_globals(), transform_time():
            pixels = self.transform(image)
        return Instance(images=DistTensorData(pixels), labels=DistTensorData(label, placement_idx=-1))

    def stages(self, index: int) -> List[Tuple[str, Any]]:
        """The image as it was opened, and after each stage of the transform; see `transform_stages`."""
        image, _ = self._open(index)
        with seeded_globals():
            return [(f"opened as {self.mode}", image), *transform_stages(self.transform, image)]

    def _open(self, index: int) -> Tuple[Image.Image, int]:
        path, label = self.source[index]
        try:
            with Image.open(path) as file:
                return file.convert(self.mode), label
        except Exception as error:  # Pillow's decoders raise of many kinds for a broken file
            raise OSError(f"{path} cannot be read as an image: {error}") from error
