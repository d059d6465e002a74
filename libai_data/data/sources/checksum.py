"""Check sums of files."""

from __future__ import annotations

import hashlib
from pathlib import Path


def md5_of(path: Path) -> str:
    """The MD5 sum of a file, in hexadecimal."""
    digest = hashlib.md5()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
