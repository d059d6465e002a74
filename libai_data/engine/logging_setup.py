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
"""`extra` of log lines that say what the live progress bar shows already."""


def has_progress_bar() -> bool:
    """Whether somebody watches: the bar is for a terminal that has a size."""
    if not sys.stderr.isatty():
        return False
    # Terminals of build servers may be 0 columns wide and 0 lines high, and a bar would be too.
    with suppress(OSError, ValueError):
        return min(os.get_terminal_size(sys.stderr.fileno())) > 0
    return True


class _KeepsQuiet(logging.Handler):
    """Says once that lines cannot be written (a full disk, a closed pipe), and not for every line anew."""

    _target = "the output"
    _has_told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_told:
            self._has_told = True
            with suppress(OSError, ValueError):
                sys.stderr.write(f"libai_data: log lines cannot be written to {self._target}: {error}\n")


class _FileHandler(_KeepsQuiet):
    """Appends whole lines to a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = AppendFile(path)
        self._target = path

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.append(f"{self.format(record)}\n".encode())
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()
        super().close()


class _ConsoleHandler(_KeepsQuiet, logging.StreamHandler):
    """Writes above a live progress bar, if there is one, instead of through it, and leaves out what it shows."""

    has_bar = False

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_on_bar", False) and self.has_bar and self.stream.isatty():
            return
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def set_bar(is_shown: bool) -> None:
    """Say whether a live progress bar is shown, so that the console leaves out log lines that it makes superfluous."""
    for handler in logging.getLogger(_NAME).handlers:
        if isinstance(handler, _ConsoleHandler):
            handler.has_bar = is_shown


def setup_logger(output_dir: str | None = None, rank: int = 0, name: str = "log.txt") -> logging.Logger:
    """Send the log lines of this package, and of code that logs below its name, to console and file.

    Args:
        output_dir: rank 0 appends to `<name>` there, rank n to `<name>.rank<n>`; None for no file.
        rank: rank 0 shows all from INFO on on the console, others only what is at least an ERROR.
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
        # If the folder cannot be made, the handler says that lines are lost.
        with suppress(OSError):
            os.makedirs(output_dir, exist_ok=True)
        file = _FileHandler(os.path.join(output_dir, name if rank == 0 else f"{name}.rank{rank}"))
        file.setFormatter(logging.Formatter(_FORMAT, _DATES))
        logger.addHandler(file)
    return logger
