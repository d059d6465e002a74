"""ImageNet, with LiBai's arguments."""

from __future__ import annotations

from pathlib import Path

from libai_data.data.datasets.labelled_images import ImageSource, LabelledImages, Transform
from libai_data.data.sources.image_folder import ImageFolderSource
from libai_data.data.sources.imagenet_tar import ImageNetTarSource


class ImageNetDataset(LabelledImages):
    """ImageNet 2012: of folders `<root>/{train,val}/n01440764/*.JPEG`, or of the published archives.

    Args:
        root: the folder that holds `train` and `val`, or ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar.
        train: whether to take the images to train with, or those to test with.
        transform: from an image to an array; see `LabelledImages`.
        val_labels: of the archive's images to test with; see `ImageNetTarSource`.
        cache_dir: for the list of the images; see `ImageFolderSource`.

    Raises:
        ConfigError: There are neither folders nor archives.
        FormatError: An archive is broken.
    """

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        transform: Transform | None = None,
        val_labels: str | Path | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        folder = Path(root) / ("train" if train else "val")
        source: ImageSource
        if folder.is_dir():
            source = ImageFolderSource(folder, cache_dir=cache_dir)
        else:
            source = ImageNetTarSource(root, train, val_labels, cache_dir)
        super().__init__(source, transform)
