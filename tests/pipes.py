"""Reading line by line what a process prints, without taking more than the line."""

from __future__ import annotations

import os
import subprocess
from typing import Any


def next_line(process: subprocess.Popen[Any]) -> str:
    """The next line that a process prints, empty when it has closed its output.

    What it prints afterwards stays in the pipe for `communicate`, which does not see what `readline` has buffered.
    """
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n") and (character := os.read(process.stdout.fileno(), 1)):
        line += character
    return line.decode()
