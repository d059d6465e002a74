"""Rows of a stream that cannot be read. With `on_error="skip"` the loader receives, counts and leaves them out."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

from libai_data.errors import ENDS_PROGRAM, SampleError, error_text


class FailedRow(NamedTuple):
    """A row that could not be read. The loader counts it, and leaves it out."""

    error: str  # type and message of the exception
    kind: str  # name of the exception's class


class StreamEnded(SampleError):
    """An error that ended the stream."""


class Skipping:
    """Iterates over the rows of an iterator that continues after errors; yields a `FailedRow` for each error."""

    def __init__(self, rows: Iterator[Any], name: str) -> None:
        self._rows, self._name = rows, name
        self._may_have_ended: str | None = None

    def __iter__(self) -> Skipping:
        return self

    def __next__(self) -> Any:
        try:
            row = next(self._rows)
        except StopIteration:
            if self._may_have_ended is not None:
                raise self._ended(self._may_have_ended) from None
            raise
        except (StreamEnded, *ENDS_PROGRAM):
            raise
        except BaseException as error:
            text = error_text(error)
            if inspect.isgenerator(self._rows):
                raise self._ended(text) from error
            # The generator may be the source, which has then ended, or may have decoded only this row.
            self._may_have_ended = text if _passed_a_generator(error) else None
            return FailedRow(text, type(error).__name__)
        self._may_have_ended = None
        return row

    def _ended(self, text: str) -> StreamEnded:
        return StreamEnded(
            f"on_error='skip' cannot continue {self._name} after {text}: an error ends a Python generator. Move what "
            "may fail out of the generator, with MappedStream(source, decode) or map(decode, names), or catch the "
            "error where it is raised"
        )


def _passed_a_generator(error: BaseException) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code.co_flags & inspect.CO_GENERATOR for frame in frames)
