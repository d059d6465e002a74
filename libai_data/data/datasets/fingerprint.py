"""Fingerprints: a checkpoint stores one for each dataset, so that a resume notices another dataset."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from libai_data.data.attributes import attribute_of
from libai_data.errors import ConfigError

_MOST_CHARACTERS = 400


def fingerprint_of(dataset: Any) -> dict[str, Any]:
    """{"name": name of a dataset's class, "content": result of its method `fingerprint()`, or its attribute
    `fingerprint`}.

    The method should be cheap, and return JSON values, such as a hash of its files; a ConfigError if JSON cannot store
    them. The result must stay equal while each index has the same sample. A long one is stored as a hash.
    """
    found: dict[str, Any] = {"name": type(dataset).__name__}
    own = attribute_of(dataset, "fingerprint")
    if callable(own) or isinstance(own, (str, int, float, list, tuple, dict)):
        content = own() if callable(own) else own
        try:
            text = json.dumps(content, sort_keys=True, default=np.generic.item)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{found['name']}.fingerprint() returned {content!r:.200}, which JSON cannot hold ({error}); return "
                "texts, numbers, or lists and dicts of these"
            ) from error
        # Convert the content as JSON will read it back: tuples become lists.
        found["content"] = json.loads(text) if len(text) <= _MOST_CHARACTERS else hash_of(text.encode())
    return found


def hash_of(data: bytes | memoryview, size: int = 12) -> str:
    """A short hash of `size` bytes, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=size).hexdigest()
