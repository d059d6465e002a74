"""Pickles for another process of the same program, in which classes of the main script may not exist."""

from __future__ import annotations

import io
import pickle
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np


class PicklerByValue(cloudpickle.CloudPickler):
    """Pickles lambdas and classes of the main script by value, and memoryviews with their format and shape.

    So it does with classes of a module that is being imported here: another process that imports the module would run
    it up to this place, and start processes too.

    A class that is sent to a worker by value, and sent back, becomes the original class again.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The main script has this name in a process of `multiprocessing` that was spawned.
        if (script := sys.modules.get("__mp_main__")) is not None:
            cloudpickle.register_pickle_by_value(script)

    def dump(self, obj: Any) -> None:
        by_value = cloudpickle.list_registry_pickle_by_value()
        added = [module for module in _being_imported() if module.__name__ not in by_value]
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        try:
            super().dump(obj)
        finally:
            for module in added:
                with suppress(ValueError):  # Another thread was faster.
                    cloudpickle.unregister_pickle_by_value(module)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, memoryview):
            # cloudpickle would turn the view into bytes, which have other items.
            flat = obj.cast("B") if obj.c_contiguous and obj.nbytes else bytearray(obj.tobytes())
            data = np.frombuffer(flat, np.uint8)
            return _view_again, (data, obj.format, obj.shape, obj.readonly)
        return super().reducer_override(obj)


def _being_imported() -> list[ModuleType]:
    """The modules whose code, up to this call, runs in this thread."""
    names: dict[str, Any] = {}
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "<module>":
            names[frame.f_globals.get("__name__", "")] = frame.f_globals
    return [module for name, own in names.items() if (module := sys.modules.get(name)) and vars(module) is own]


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
