"""Where log lines go: rank 0's to the console, each rank's to a file."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress

from libai_data.atomic_files import AppendFile

_NAME = "libai_data"
_FORMAT = "[%(asctime)s] %(levelname)s %(name)s: %(message)s"
_DATES = "%m/%d %H:%M:%S"


ON_BAR = {"is_on_bar": True}
"""`extra` of log lines whose contents the live progress bar already shows."""


class _ReportsOnce(logging.Handler):
    """Reports only once that lines cannot be written (a full disk, a closed pipe), and not for each line."""

    _target = "the output"
    _has_reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_reported:
            self._has_reported = True
            with suppress(AttributeError, OSError, ValueError):  # There is no `sys.stderr`, or it is closed.
                sys.stderr.write(f"libai_data: log lines cannot be written to {self._target}: {error}\n")


class _FileHandler(_ReportsOnce):
    """Appends whole lines to a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = AppendFile(path)
        self._target = path

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.append(f"{self.format(record)}\n".encode(errors="backslashreplace"))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()
        super().close()


class _ConsoleHandler(_ReportsOnce, logging.StreamHandler):
    """If there is a live progress bar, writes above it, and leaves out lines whose contents the bar shows."""

    has_bar = False

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_on_bar", False) and self.has_bar and self.stream.isatty():
            return
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        # Names of files may have bytes that are no text, and a terminal may lack letters.
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        return super().format(record).encode(encoding, "backslashreplace").decode(encoding)


def set_bar(is_shown: bool) -> None:
    """Set whether a live progress bar is shown; if so, the console leaves out log lines whose contents it shows."""
    for handler in logging.getLogger(_NAME).handlers:
        if isinstance(handler, _ConsoleHandler):
            handler.has_bar = is_shown


def setup_logger(output_dir: str | None = None, rank: int = 0, name: str = "log.txt") -> logging.Logger:
    """Send the log lines of this package, and of loggers below `libai_data`, to console and file.

    Args:
        output_dir: rank 0 appends to `<name>` there, rank n to `<name>.rank<n>`; None for no file.
        rank: on the console, rank 0 shows lines of level INFO and above, and other ranks only ERROR and above.
    """
    logger = logging.getLogger(_NAME)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    console = _ConsoleHandler(sys.stdout)
    console.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    console.setFormatter(logging.Formatter(_FORMAT if rank == 0 else f"[rank {rank}] {_FORMAT}", _DATES))
    logger.addHandler(console)
    if output_dir:
        # If the folder cannot be created, the handler reports that lines are lost.
        with suppress(OSError):
            os.makedirs(output_dir, exist_ok=True)
        file = _FileHandler(os.path.join(output_dir, name if rank == 0 else f"{name}.rank{rank}"))
        file.setFormatter(logging.Formatter(_FORMAT, _DATES))
        logger.addHandler(file)
    return logger
