"""The working directory, which may have been deleted since the process, or its shell, entered it."""

from __future__ import annotations

import os
from contextlib import suppress

from libai_data.errors import ConfigError


def working_directory() -> str:
    """The path of the working directory; a ConfigError if it was deleted, or a folder above it cannot be read."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        path = os.environ.get("PWD", "")
        with suppress(OSError):  # Linux shows the path of a deleted folder too.
            path = os.readlink("/proc/self/cwd").rpartition(" (deleted)")[0] or path
        again = " It exists again, but as another folder." if path and os.path.isdir(path) else ""
        raise ConfigError(
            f"the working directory {path} was deleted, and relative paths begin there.{again} Change to a folder that "
            f"exists ({f'cd {path}' if again else 'cd FOLDER'}), and run the command again"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the working directory cannot be found ({error.strerror}), and relative paths begin there. Change to "
            "another folder (cd FOLDER), and run the command again"
        ) from None
