"""One rank of a crew: opens contenders and measures them when it is told to; started by `Crew`."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from libai_data.benchmark.deliveries import CONTENDERS
from libai_data.benchmark.messages import Line
from libai_data.benchmark.rounds import Measure, Scale
from libai_data.peers.liveness import say_farewell


def main() -> None:
    """Carry out orders until there are no more."""
    # At once: until rank 0 listens, the launcher starts no other rank.
    importlib.import_module("oneflow")
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.connect(sys.argv[1])
    line, rank = Line(end), int(os.environ["RANK"])
    opened: dict[str, Measure] = {}
    with ExitStack() as stack:
        while True:
            try:
                order = line.receive()
            except (EOFError, OSError):
                break  # The crew is dismissed.
            try:
                line.send({"rank": rank, "value": _carry_out(order, opened, stack)})
            except Exception:
                line.send({"rank": rank, "error": traceback.format_exc()})
                os._exit(1)
    say_farewell()
    sys.stdout.flush()
    # OneFlow's own way out would wait for the other ranks, of which one may have failed.
    os._exit(0)


def _carry_out(order: dict[str, Any], opened: dict[str, Measure], stack: ExitStack) -> Any:
    name = order["name"]
    if order["do"] == "open":
        scale = Scale(order["quick"], order["seconds"], Path(order["folder"]))
        opened[name] = stack.enter_context(CONTENDERS[name](scale))
        return None
    return opened[name]()


if __name__ == "__main__":
    main()
