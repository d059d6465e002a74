"""A store on this machine, as slow as one far away: a delay before each answer, and a bandwidth that answers share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_PIECE = 1 << 16


class SlowStore:
    """Answers by http.

    Args:
        folder: whose files it has.
        delay: seconds before each answer.
        bandwidth: bytes a second, of all answers together; None for what the machine gives.

    Attributes:
        sent: bytes of shards that were sent.
    """

    def __init__(self, folder: Path, delay: float = 0.02, bandwidth: float | None = None) -> None:
        self.sent = 0
        self._delay, self._bandwidth = delay, bandwidth
        self._free_at, self._lock = 0.0, threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_handler_of(self), directory=str(folder)))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def wait(self, size: int = 0) -> None:
        """Wait until an answer may begin, or until some bytes of it may be sent."""
        if not size:
            time.sleep(self._delay)
            return
        with self._lock:
            self.sent += size
            if self._bandwidth is None:
                return
            self._free_at = max(self._free_at, time.monotonic()) + size / self._bandwidth
            until = self._free_at
        time.sleep(max(until - time.monotonic(), 0))

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def slow_store(folder: Path, delay: float = 0.02, bandwidth: float | None = None) -> Iterator[SlowStore]:
    """A store for as long as the context lasts."""
    store = SlowStore(folder, delay, bandwidth)
    try:
        yield store
    finally:
        store.close()


def _handler_of(store: SlowStore) -> Any:
    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            store.wait()
            with suppress(ConnectionError):  # Who reads ahead may end meanwhile.
                super().do_GET()

        def copyfile(self, source: Any, outputfile: Any) -> None:
            is_shard = self.path.endswith(".npy")
            while piece := source.read(_PIECE):
                if is_shard:
                    store.wait(len(piece))
                outputfile.write(piece)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
