"""How long to wait for others, as the environment says."""

from __future__ import annotations

import os

from libai_data.errors import ConfigError


def seconds_from_environment(variable: str, default: float) -> float:
    """Seconds that an environment variable sets.

    Args:
        variable: its name.
        default: seconds where it is not set.

    Raises:
        ConfigError: The variable is no positive number.
    """
    value = os.environ.get(variable, str(default))
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"{variable} is {value!r}; it must be a number of seconds above 0")
    return seconds
