"""Pickles for another process of the same program, in which classes of the main script may not exist."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

import cloudpickle
import numpy as np


class PicklerByValue(cloudpickle.CloudPickler):
    """Pickles lambdas and classes of the main script by value, and memoryviews with their format and shape.

    A class that is sent to a worker by value, and sent back, becomes the original class again.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The main script has this name in a process of `multiprocessing` that was spawned.
        if (script := sys.modules.get("__mp_main__")) is not None:
            cloudpickle.register_pickle_by_value(script)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, memoryview):
            # cloudpickle would turn the view into bytes, which have other items.
            flat = obj.cast("B") if obj.c_contiguous and obj.nbytes else bytearray(obj.tobytes())
            data = np.frombuffer(flat, np.uint8)
            return _view_again, (data, obj.format, obj.shape, obj.readonly)
        return super().reducer_override(obj)


def pickled_by_value(thing: Any) -> bytes:
    """A pickle that another process of this program can load with `pickle.loads`."""
    packed = io.BytesIO()
    PicklerByValue(packed, protocol=5).dump(thing)
    return packed.getvalue()


def pickled(thing: Any) -> bytes:
    """A pickle of an object; by value, which is slower, only if the usual pickling fails."""
    try:
        return pickle.dumps(thing, protocol=5)
    except Exception:
        return pickled_by_value(thing)


def _view_again(data: np.ndarray, form: str, shape: tuple[int, ...], readonly: bool) -> memoryview:
    view = memoryview(data).cast(form, shape) if data.size else memoryview(data).cast("B").cast(form)  # type: ignore
    return view.toreadonly() if readonly else view
