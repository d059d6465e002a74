"""The libraries that decode and change pictures, imported when they are first used."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

_HINT = "pip install libai_data[images]"


@cache
def has_opencv() -> bool:
    """Whether OpenCV is installed."""
    return find_spec("cv2") is not None


@cache
def opencv() -> Any:
    """OpenCV, told to use no threads of its own: the loader's workers share the cores already.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import cv2
    except ImportError as error:
        raise ImportError(f"transforms of images need OpenCV: {_HINT}") from error
    cv2.setNumThreads(0)
    return cv2


@cache
def libjpeg_turbo() -> Any:
    """The binding of libjpeg-turbo, simplejpeg.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import simplejpeg
    except ImportError as error:
        raise ImportError(f"decoding JPEG files needs simplejpeg: {_HINT}") from error
    return simplejpeg
