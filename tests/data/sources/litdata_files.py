"""The data sets in `litdata.tar.xz`, as the package litdata has written them, so that each run compares with its files.

Five samples in two chunks, by litdata 0.2.76 with PyTorch 2.13 and pyarrow 26: each data set by
`BinaryWriter(folder, chunk_size=3, **options)`, `writer[number] = sample_of(number)`, `writer.done(); writer.merge()`.
Images are Pillow's, "tensors" PyTorch's, and all else as `sample_of`, `row_of` and `tokens_of` return it.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES = 5


def unpack(folder: Path) -> None:
    """Write the data sets into folders of this one.

    They are called "plain"; "chunk", "batch" and "sample", by what `compression="zstd"` compresses at once; "table", of
    samples that LitData writes as rows of Arrow; and "tokens", of `TokensLoader`.
    """
    with tarfile.open(Path(__file__).with_name("litdata.tar.xz")) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            (folder / member.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / member.name).write_bytes(content.read())


def sample_of(number: int) -> dict[str, Any]:
    """A sample of every format, by the names that its values have in a record."""
    return {
        "int": number - 2,
        "float": number / 3,
        "text": "ü" * number,
        "bytes": bytes(number),
        "bool": number % 2 == 0,
        "pil": np.arange(12, dtype=np.uint8).reshape(2, 2, 3) + np.uint8(number),
        "vector": np.arange(number, dtype=np.float32),
        "array": np.arange(2 * number, dtype=np.int16).reshape(2, number),
        "tensors.vector": np.arange(number),
        "tensors.tensor": np.arange(2 * number, dtype=np.float16).reshape(number, 1, 2),
        "lists.texts": ["a"] * number,
        "lists.ints": [number],
        "lists.floats": [0.5, 1.5],
        "lists.bools": [True, False],
        "lists.mixed": [1, "x", None],
        "lists.dicts": [{"text": "b", "int": -number, "float": 0.5, "bool": True, "none": None}] * 2,
        "lists.dict": [{"x": {"y": [0.5]}, "z": number}],
    }


def row_of(number: int) -> dict[str, Any]:
    """A sample that LitData writes as a row of Arrow, by the names that its values have in a record."""
    return {"text": "ü" * number, "int": number, "list": [number] * number, "outer.inner": number / 3}


def tokens_of(number: int) -> dict[str, Any]:
    """A sample of tokens."""
    return {"0": np.arange(number, dtype=np.int32)}
