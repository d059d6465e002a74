"""Converts labelled images of any source to records."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from libai_data.data.attributes import attribute_of
from libai_data.data.datasets.fingerprint import fingerprint_of
from libai_data.data.files.identity import key_of
from libai_data.data.sources.sharded import Records

LABEL = "cls"
_KINDS = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"BM": "bmp",
    b"GIF8": "gif",
    **dict.fromkeys((b"P3", b"P6"), "ppm"),
    **dict.fromkeys((b"P2", b"P5"), "pgm"),
    **dict.fromkeys((b"P1", b"P4"), "pbm"),
    b"RIFF": "webp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
}


class ImageRecords(Records):
    """Records of an image and its label, with the field names of WebDataset: {"jpg": ..., "cls": 7}.

    Image files are copied unchanged. Arrays are encoded as PNG, which is lossless. The format of the first image
    decides the field name of all images.

    Args:
        images: a source with an `identity`, whose `read(index)` returns an image and its label. The image is encoded
            bytes, or uint8 [H, W] or [H, W, C].

    Attributes:
        identity: identity of the records; see `libai_data.data.files.identity`.
    """

    def __init__(self, images: Any) -> None:
        self._images = images
        first = _encoded(images.read(0)[0]) if len(images) else b""
        self._field = next((kind for magic, kind in _KINDS.items() if first.startswith(magic)), "img")
        self._ends = np.array([len(images)])
        self.identity = self.identity_of(0, len(images))

    def rows_of(self, number: int, rows: np.ndarray) -> list[dict[str, Any]]:
        read = map(self._images.read, rows.tolist())
        return [{self._field: _encoded(image), LABEL: int(label)} for image, label in read]

    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint of the images."""
        return fingerprint_of(self._images)

    def identity_of(self, first: int, stop: int) -> str:
        """The identity of records `first` to `stop` - 1, from the current state of their files."""
        of_range = attribute_of(self._images, "identity_of")
        images = self._images.identity if of_range is None else of_range(first, stop)
        return key_of(type(self._images).__name__, self._field, images, first, stop)


def _encoded(image: Any) -> bytes:
    if isinstance(image, bytes):
        return image
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(np.asarray(image)).save(content, "PNG")
    return content.getvalue()
