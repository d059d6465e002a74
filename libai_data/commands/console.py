"""What console commands share: lines that are printed as they come, and errors as one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Callable

from libai_data.errors import DataPipelineError


def print_lines(command: str, lines: Callable[[], Iterable[str]], also_told: tuple[type[Exception], ...] = ()) -> int:
    """Print what a command has to say.

    Args:
        command: its name, which errors begin with.
        lines: makes the lines; what it raises as a `DataPipelineError` or OSError is told in a line of stderr.
        also_told: other errors that are told so.

    Returns:
        Exit code: 1 after an error.
    """
    told: tuple[type[Exception], ...] = (DataPipelineError, OSError) + also_told
    try:
        for line in lines():
            print(line, flush=True)
    except told as error:
        print(f"libai-data {command}: {error}", file=sys.stderr)
        return 1
    return 0
