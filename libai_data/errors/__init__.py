"""The error classes of libai_data, and functions that word their messages.

Every class also derives from a built-in exception of the same kind, so that code that does not know this package can
catch it.
"""

from __future__ import annotations

import errno
import importlib
import resource
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

_Value = TypeVar("_Value")

_MOST_INDICES = 1000
_UNITS = ("B", "KB", "MB", "GB", "TB")


class DataPipelineError(Exception):
    """The base class of all errors of this package."""

    config_path: str | None = None
    """The config key of the failed call, if `instantiate` made the call."""


class ConfigError(DataPipelineError, ValueError):
    """A config file, a key, an override or an argument from the config is wrong."""


class ConfigImportError(ConfigError, ImportError):
    """A module that a config file imports, or a package that an argument needs, does not exist."""


class ConfigKeyError(ConfigError, KeyError):
    """An override names a key that the config does not have."""

    __str__ = Exception.__str__  # KeyError's __str__ would put the message into quotes.


class MeshError(DataPipelineError, ValueError):
    """The parallel sizes do not fit together, or do not fit the number of ranks."""


class SchemaError(DataPipelineError, ValueError):
    """The fields of samples or batches differ, or do not fit the model."""


class SampleError(DataPipelineError, RuntimeError):
    """A sample could not be read or transformed."""


class FormatError(DataPipelineError, ValueError):
    """A data file is truncated, of another format, or contradicts itself."""


class StorageError(DataPipelineError, OSError):
    """A file of a store cannot be fetched, has changed, or finds no room in the cache."""


class ContractError(DataPipelineError, RuntimeError):
    """The ranks do not get the same data: a promise of the layout is broken."""


ENDS_PROGRAM = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that end the program, and are not errors of the sample that is being read."""


class PeerError(DataPipelineError, ConnectionError):
    """Another rank of the job has failed, or cannot be reached; the output of that rank shows the cause."""


class NonFiniteLossError(DataPipelineError, FloatingPointError):
    """A loss is NaN or infinite."""


class PassError(DataPipelineError, RuntimeError):
    """An iterator of a loader cannot continue: an interrupt, a newer iterator, another state or `close` ended it."""


class CheckpointError(DataPipelineError, RuntimeError):
    """A checkpoint or a saved state is missing or broken, or belongs to other data or another run."""


def error_text(error: BaseException) -> str:
    """The type and message of any exception, even if its `__str__` raises."""
    try:
        message = str(error)
    except Exception as failure:
        message = f"(its message cannot be shown: __str__ raises {type(failure).__name__})"
    return f"{type(error).__name__}: {message}"


def failed_reading(which: str, error: BaseException) -> SampleError:
    """The error for a failure of a user's code: it names the samples (`which`) and the exception.

    `error` may be any BaseException, because libraries in Rust raise PanicException, which is no Exception. Exceptions
    of `ENDS_PROGRAM` are raised unchanged.
    """
    if isinstance(error, ENDS_PROGRAM):
        raise error
    return SampleError(f"{which}: {error_text(error)}")


def comes_from_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler raised an exception.

    Python calls a handler with the interrupted frame as an argument, and this frame is also the caller's frame.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        below, given = frame.f_back, frame.f_locals.values()
        if below is not None and any(
            value is below or (isinstance(value, tuple) and any(each is below for each in value)) for value in given
        ):
            return True
    return False


@contextmanager
def refusing_exit(what: str) -> Iterator[None]:
    """Make a ConfigError of a SystemExit in the block, which is `what`, unless a signal handler raised it.

    After `sys.exit(0)` in a user's code that prepares data, for example, a program without training would look
    successful.
    """
    try:
        yield
    except SystemExit as error:
        if comes_from_signal_handler(error):
            raise
        raise ConfigError(f"{what} called sys.exit({error.code!r}); let it return, or raise an error") from error


def nearest(name: object, known: Iterable[object], cutoff: float = 0.6) -> str:
    """The hint to append to an error about an unknown name.

    Args:
        name: what the user wrote.
        known: the valid names.
        cutoff: the least similarity, from 0 to 1, as `difflib` measures it.

    Returns:
        `" Did you mean 'x'?"`, with a leading space, or `""` if no valid name is similar to `name`.
    """
    spellings: dict[str, str] = {}
    for candidate in known:
        spellings.setdefault(str(candidate).lower(), str(candidate))
    import difflib  # Imported here, because the import would delay the start of each worker.

    close = difflib.get_close_matches(str(name).lower(), spellings, n=1, cutoff=cutoff)
    return f" Did you mean '{spellings[close[0]]}'?" if close else ""


@contextmanager
def naming_open_files() -> Iterator[None]:
    """Name the limit and the remedy in the OSError if the block opens more files, pipes or sockets than it may."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        words = f"this process may have {limit} open files, pipes and sockets (`ulimit -n`), and needs more"
        remedy = "run `ulimit -n 65536` before the program, or use fewer workers"
        raise OSError(errno.EMFILE, f"{words}; {remedy}") from error


def first_repeated(values: Iterable[_Value]) -> _Value | None:
    """The first value that an earlier one equals; None if all differ."""
    seen: set[_Value] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def numbers_in_words(numbers: Sequence[int]) -> str:
    """Ascending numbers in words; consecutive numbers become a range: `0-3 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def bytes_in_words(count: float) -> str:
    """Bytes with a decimal unit, to three digits."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def indices_in_words(indices: Any) -> str:
    """A list or vector of indices for a message: `[4, 7]`; of more than 1,000, the first ones and their number."""
    shown = [*map(int, indices[:_MOST_INDICES])]
    return f"{shown}" if len(indices) == len(shown) else f"[{str(shown)[1:-1]}, ...; {len(indices)} in all]"


def by_rank(values: dict[int, str]) -> str:
    """Each different value, with the ranks that have it: `1.26.4 on rank 0-2, but 1.26.3 on rank 3`.

    Args:
        values: rank -> its value.
    """
    told = ranks_by_value(values).items()
    return ", but ".join(f"{value} on rank {numbers_in_words(ranks)}" for value, ranks in told)


def ranks_by_value(values: Mapping[int, _Value]) -> dict[_Value, list[int]]:
    """Value -> the ranks that have it, ascending; values in the order of their first ranks.

    Args:
        values: rank -> its value.
    """
    found: dict[_Value, list[int]] = {}
    for rank in sorted(values):
        found.setdefault(values[rank], []).append(rank)
    return found


def installed(package: str, whom: str, install: str) -> Any:
    """Import an optional package.

    Args:
        package: name of the package, or of a module in it.
        whom: the feature that needs the package, for the error.
        install: arguments of `pip install`, for the error.

    Raises:
        ConfigImportError: The package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise ConfigImportError(f"{whom} needs the package {name}: pip install {install} ({error})") from error
