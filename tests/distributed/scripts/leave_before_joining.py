"""A rank that never comes to `import oneflow`: `leave_before_joining.py HOW:RANK FOLDER`.

The launcher starts rank 1 when rank 0 waits in the import. A rank that works on, whatever it is told, writes
`FOLDER/ready`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import libai_data  # noqa: F401

HOW, _, WHERE = sys.argv[1].partition(":")
RANK = os.environ["RANK"]

if RANK == WHERE:
    if HOW == "return":
        sys.exit(0)
    if HOW == "_exit":
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(sys.argv[2], "ready").touch()
    time.sleep(1000)
# As a program does that saves its work first; inside of the import, no handler runs.
signal.signal(signal.SIGTERM, lambda *signal: sys.exit(1))
import oneflow  # noqa: E402, F401
