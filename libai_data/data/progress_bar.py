"""A progress bar that never ends the work that it shows."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any


def progress_bar(*arguments: Any, **options: Any) -> Any:
    """Make a bar of tqdm, with its arguments. What cannot be written is left out: if standard error is closed, or is on
    a full disk or a pipe that nobody reads."""
    from tqdm import tqdm

    make: Any = tqdm
    return make(*arguments, file=_Output(), **options)


class _Output:
    """Standard error without its failures; equal to it, so that tqdm clears the bar before other lines."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)

    def __eq__(self, other: object) -> bool:
        return other is sys.stderr or isinstance(other, _Output)

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
