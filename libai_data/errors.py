"""The errors of libai_data, and the hint that names what the user probably meant.

Every class also derives from the built-in exception that fits it, so that code which knows nothing of this package
catches it as it expects to.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DataPipelineError(Exception):
    """The base of all errors that this package raises on its own account."""

    config_path: str | None = None
    """The config key of the call that failed, when `instantiate` made that call."""


class ConfigError(DataPipelineError, ValueError):
    """A config file, a key, an override or an argument from the config is wrong."""


class MeshError(DataPipelineError, ValueError):
    """The parallel sizes do not fit together, or do not fit the ranks at hand."""


class SchemaError(DataPipelineError, ValueError):
    """The fields of samples or batches differ, or do not fit the model."""


class SampleError(DataPipelineError, RuntimeError):
    """A sample could not be read or transformed."""


class FormatError(DataPipelineError, ValueError):
    """A data file is truncated, of another format, or contradicts itself."""


class StorageError(DataPipelineError, OSError):
    """A file of a store cannot be fetched, has changed, or finds no room in the cache."""


class ContractError(DataPipelineError, RuntimeError):
    """The ranks are not fed alike: what the layout promises does not hold."""


class PeerError(DataPipelineError, ConnectionError):
    """Another rank of the job has failed, or cannot be reached; that rank tells the cause."""


class NonFiniteLossError(DataPipelineError, FloatingPointError):
    """A loss is NaN or infinite."""


class PassError(DataPipelineError, RuntimeError):
    """An iterator of a loader cannot go on: it was interrupted, or a newer one, another state or `close` ended it."""


class CheckpointError(DataPipelineError, RuntimeError):
    """A checkpoint or a saved state is missing, broken, or belongs to something else."""


def error_text(error: BaseException) -> str:
    """The type and message of any exception, also of one whose `__str__` raises."""
    try:
        message = str(error)
    except Exception as failure:
        message = f"(its message cannot be shown: __str__ raises {type(failure).__name__})"
    return f"{type(error).__name__}: {message}"


def nearest(name: object, known: Iterable[object]) -> str:
    """The hint to append to an error about an unknown name.

    Args:
        name: what the user wrote.
        known: the names that would have been right.

    Returns:
        `" Did you mean 'x'?"`, with a leading space, or `""` where nothing known resembles `name`.
    """
    spellings: dict[str, str] = {}
    for candidate in known:
        spellings.setdefault(str(candidate).lower(), str(candidate))
    close = difflib.get_close_matches(str(name).lower(), spellings, n=1, cutoff=0.6)
    return f" Did you mean '{spellings[close[0]]}'?" if close else ""
