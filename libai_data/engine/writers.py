"""Where measured scalars go: console or log file, JSON lines, TensorBoard events."""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
import statistics
import struct
import time
from itertools import takewhile
from typing import Any

from libai_data.atomic_files import AppendFile, written_whole
from libai_data.engine.events import EventStorage, get_event_storage
from libai_data.engine.logging_setup import ON_BAR
from libai_data.errors.argument_rules import OUTPUT, OUTPUT_FILE, check

SOURCE = "consumed_tokens/"
"""Prefix of the names of numbers that are the tokens of one dataset."""
EVALUATED = "eval_seconds"
"""Name of the number that each evaluation has beside its results."""

logger = logging.getLogger(__name__)


class EventWriter:
    """Writes the new scalars of the running training's `EventStorage`."""

    def write(self) -> None:
        """Write what is new since the last call."""
        raise NotImplementedError(f"{type(self).__name__} must implement write()")

    def close(self) -> None:
        """Close files."""


class NewScalars:
    """Finds the scalars put since the last call; averages the new values of a scalar with the smoothing hint."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._storage: EventStorage | None = None

    def take(self, storage: EventStorage) -> dict[str, tuple[float, int]]:
        """Scalars put since the last call: name -> (value, iteration of the last put)."""
        if storage is not self._storage:  # Each call of `train` has a storage of its own.
            self._storage, self._seen = storage, {}
        found = {}
        for name, history in storage.histories().items():
            new = history.count - self._seen.get(name, 0)
            self._seen[name] = history.count
            if new:
                values = history.values()[-new:]
                value, iteration = values[-1]
                if history.smoothing_hint:
                    value = statistics.fmean(value for value, _ in values)
                found[name] = (value, iteration)
        return found


class _FileWriter(EventWriter):
    """Appends new scalars to a file."""

    def __init__(self, path: str, start_iter: int) -> None:
        self._file = AppendFile(path)
        self._start_iter = start_iter
        self._new = NewScalars()
        self._begun: EventStorage | None = None  # of the training whose first step the file has

    def _new_start(self) -> int | None:
        """The first step of a training that the file does not have yet; None if the file has it."""
        storage = get_event_storage()
        if storage is self._begun:
            return None
        return self._start_iter if self._begun is None else storage.start_iter

    def close(self) -> None:
        self._file.close()


class JSONWriter(_FileWriter):
    """Writes a line of JSON for each iteration with new scalars.

    Losses are means since the line before, of at most the last 1,000 steps.

    Non-finite numbers are written as null, so that every line is JSON.

    Args:
        json_file: path. Lines of iterations from `start_iter` on, and an incomplete last line, are removed first: a
            resumed training repeats these steps, and a new training begins a new file. Each later call of `train`
            removes the lines from its first step on.
    """

    def __init__(self, json_file: str, start_iter: int = 0) -> None:
        check({"json_file": OUTPUT_FILE}, json_file=json_file)
        super().__init__(json_file, start_iter)

    def lacks(self, iteration: int) -> bool:
        """Whether the file has no evaluation after an iteration. Lines that the next writing removes do not count."""
        end = iteration + 1
        lines = _lines_before(self._file.path, min(end, self._start_iter) if self._begun is None else end)
        last = takewhile(lambda line: line["iteration"] == iteration, map(json.loads, reversed(lines)))
        return not any(EVALUATED in line for line in last)

    def write(self) -> None:
        lines: dict[int, dict[str, object]] = {}
        for name, (value, iteration) in self._new.take(get_event_storage()).items():
            finite = value == value and abs(value) != float("inf")
            lines.setdefault(iteration, {"iteration": iteration})[name] = value if finite else None
        start = self._new_start()
        if start is not None:
            path = self._file.path
            with written_whole(path) as unfinished:
                unfinished.write_bytes(b"".join(_lines_before(path, start)))
            self._begun = get_event_storage()
        self._file.append("".join(json.dumps(line) + "\n" for _, line in sorted(lines.items())).encode())


def _lines_before(path: str, start_iter: int) -> list[bytes]:
    if start_iter == 0 or not os.path.exists(path):
        return []
    kept = []
    with open(path, "rb") as file:
        for line in file:
            try:
                is_before = json.loads(line)["iteration"] < start_iter
            except (ValueError, KeyError, TypeError):
                continue
            if line.endswith(b"\n") and is_before:
                kept.append(line)
    return kept


class TensorboardXWriter(_FileWriter):
    """Writes TensorBoard events of all scalars.

    TensorBoard hides what an earlier run wrote from `start_iter` on, and an earlier call of `train` from the first step
    of a later call on.
    """

    def __init__(self, log_dir: str, start_iter: int = 0) -> None:
        check({"log_dir": OUTPUT}, log_dir=log_dir)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        super().__init__(os.path.join(log_dir, name), start_iter)

    def write(self) -> None:
        """Append the new scalars, and return when they are written.

        tensorboardX's own writer is not used: a full disk ends its thread, and then its queue blocks the training.
        """
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        now = time.time()
        events = [
            Event(wall_time=now, step=iteration, summary=scalar(name, value))
            for name, (value, iteration) in self._new.take(get_event_storage()).items()
        ]
        if not events:
            return
        start = self._new_start()
        if start is not None:
            events.insert(0, Event(wall_time=now, step=start, session_log=SessionLog(status=SessionLog.START)))
        version = Event(wall_time=now, file_version="brain.Event:2")
        self._file.append(b"".join(map(_record, events)), _record(version))
        self._begun = get_event_storage()


def _record(event: Any) -> bytes:
    """A TFRecord: length, its check sum, the event, its check sum."""
    from tensorboardX.record_writer import masked_crc32c

    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


class CommonMetricPrinter(EventWriter):
    """Writes a log line with the main numbers of a training that ends before step `max_iter`."""

    def __init__(self, max_iter: int) -> None:
        self._max_iter = max_iter
        self._new = NewScalars()

    def write(self) -> None:
        new = self._new.take(get_event_storage())
        if "total_loss" not in new:
            return
        value, iteration = new["total_loss"]
        parts = [f"iteration {iteration}/{self._max_iter - 1}", f"loss {value:.4g}"]
        parts += [f"{name} {new[name][0]:.4g}" for name in sorted(new) if "loss" in name and name != "total_loss"]
        for name, form in (
            ("epoch", "epoch {:.3f}"),
            ("consumed_samples", "samples {:.0f}"),
            ("consumed_tokens", "tokens {:.0f}"),
            ("lr", "lr {:.3g}"),
            ("time", "{:.4f} s/step"),
            ("samples_per_second", "{:.1f} samples/s"),
            ("tokens_per_second", "{:.0f} tokens/s"),
            ("data_wait_share", "data wait {:.1%}"),
        ):
            if name in new:
                parts.append(form.format(new[name][0]))
            if name == "consumed_tokens":
                sources = [f"{key[len(SOURCE) :]} {new[key][0]:.0f}" for key in new if key.startswith(SOURCE)]
                parts += [f"({', '.join(sources)})"] if sources else []
        if "eta_seconds" in new:
            parts.append(f"ETA {datetime.timedelta(seconds=round(new['eta_seconds'][0]))}")
        logger.info("  ".join(parts), extra=ON_BAR)
