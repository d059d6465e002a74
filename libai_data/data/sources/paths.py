"""Checks local paths that users give, and explains why there is no file at a path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from libai_data.atomic_files import PathLike
from libai_data.data.sources.remote import is_remote, without_protocol
from libai_data.errors import ConfigError, FormatError
from libai_data.errors.argument_rules import PATH, check


def checked_path(name: str, path: Any) -> Path:
    """The absolute path, which stays valid if the process changes its working folder; a ConfigError for an address."""
    check({name: PATH}, **{name: path})
    text = os.fspath(path)
    if is_remote(text):
        raise ConfigError(f"{name} is {text!r}, an address in a store; copy the files to a disk of this machine")
    return Path(without_protocol(text)).absolute()


def is_file(path: PathLike) -> bool:
    """Whether a path leads to a regular file; False if the path is too long or access is denied."""
    return os.path.isfile(path)


def check_is_file(path: Path, advice: str, kind: str = "") -> None:
    """Raise a ConfigError with advice if a path does not lead to a file of a kind, such as "file "."""
    if not is_file(path):
        raise ConfigError(f"there is no {kind}{path}{why_missing(path)}{advice}")


def why_missing(path: PathLike) -> str:
    """Why a path does not lead to the expected file or folder, as the end of a message; "" if nothing is there."""
    try:
        os.stat(path)
    except FileNotFoundError:
        if any(part.startswith("~") for part in Path(path).parts):
            return " ('~' is not expanded here; give the whole path)"
        if "{" in str(path):
            return " (braces are not expanded here; give a glob, or a list of files)"
        return " (this path is a link whose target does not exist)" if os.path.islink(path) else ""
    except OSError as error:
        return f" ({error.strerror})"
    kind = "a folder" if os.path.isdir(path) else "a file" if os.path.isfile(path) else "a pipe, socket or device"
    return f" ({kind} has this path)"


def text_of(path: Path) -> str:
    """The text of a small file; a FormatError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} at offset {error.start}: no text in UTF-8 ({error.reason})") from error
