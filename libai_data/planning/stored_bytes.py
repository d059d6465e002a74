"""How many bytes a sample is where it is stored, by the system's own count of what this process reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from libai_data.loader.failures import ErrorPolicy
from libai_data.loader.reading import SampleReader

_SAMPLES = 16


def stored_sample_bytes(dataset: Any) -> float | None:
    """Bytes that reading a sample takes from files, on the average of some; None where nothing can be counted.

    What is read through a memory map is not counted: the system reads pages of it, and keeps them.

    Args:
        dataset: with a length.
    """
    if not hasattr(dataset, "__len__") or not len(dataset):
        return None
    reader = SampleReader(dataset, 0, ErrorPolicy("raise", None))
    indices = np.linspace(0, len(dataset) - 1, _SAMPLES).round().astype(np.int64).tolist()
    # What is read once only, such as an index or a module, is not to count.
    reader.sample(0, indices[0])
    start = _read_so_far()
    if start is None:
        return None
    of_counting = (_read_so_far() or start) - start
    for index in indices:
        reader.sample(0, index)
    taken = (_read_so_far() or start) - start - 2 * of_counting
    return taken / len(indices) if taken > 0 else None


def _read_so_far() -> int | None:
    """Bytes that this process has asked for by reading files; see proc(5) on /proc/pid/io."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("rchar:")), None)
