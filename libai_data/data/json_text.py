"""JSON of users' files. An object that has a key twice is refused; Python's `json` would keep the last value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from libai_data.errors import first_repeated


def parsed_json(text: str | bytes) -> Any:
    """The value of a JSON text, or of its bytes in UTF-8. A ValueError if it is no JSON, or an object has a key twice;
    a RecursionError if it is nested too deeply."""
    # Given bytes, `json.loads` detects UTF-16. It would then accept some lines of a UTF-16 file, and refuse others.
    return _decoder.decode(text if isinstance(text, str) else str(text, "utf-8-sig"))


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = first_repeated(key for key, _ in pairs)
        raise ValueError(f"an object has the key {repeated!r} twice, so one of the values would be lost")
    return found


_decoder = json.JSONDecoder(object_pairs_hook=_object)
