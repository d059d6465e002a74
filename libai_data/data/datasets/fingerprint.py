"""Fingerprints: what a checkpoint keeps of a dataset, to tell it from another one."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from libai_data.data.attributes import attribute_of
from libai_data.errors import ConfigError

_MOST_CHARACTERS = 400


def fingerprint_of(dataset: Any) -> dict[str, Any]:
    """The name of a dataset, and what it says itself of its content.

    Args:
        dataset: a dataset with a method `fingerprint()` may return anything that JSON can hold, such as a hash of its
            files, or their names and sizes. It should be cheap, and equal as long as every index means the same sample.

    Returns:
        {"name": name of its class, "content": what `fingerprint()` returned}; a long answer is kept as a hash.

    Raises:
        ConfigError: JSON cannot hold what `fingerprint()` returned.
    """
    found: dict[str, Any] = {"name": type(dataset).__name__}
    own = attribute_of(dataset, "fingerprint")
    if callable(own):
        content = own()
        try:
            text = json.dumps(content, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{found['name']}.fingerprint() returned {content!r:.200}, which JSON cannot hold ({error}); return "
                "texts, numbers, or lists and dicts of these"
            ) from error
        # As it will be read back: tuples become lists.
        found["content"] = json.loads(text) if len(text) <= _MOST_CHARACTERS else hash_of(text.encode())
    return found


def hash_of(data: bytes | memoryview) -> str:
    """A short hash, as text."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()
