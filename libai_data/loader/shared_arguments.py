"""Arguments that several loaders have: their rules and defaults."""

from __future__ import annotations

from libai_data.data.transforms.batch import BatchTransform
from libai_data.errors.argument_rules import FIELD_NAMES, FUNCTION, INT, Rule, one_of, or_none, real, whole
from libai_data.loader.starting import START_METHODS

WORKER_TYPES = ("process", "thread")
MOST_PREFETCHED = 256
PREFETCH = 4
"""Default number of batches that workers read ahead."""
RULES = {
    "num_workers": whole(0, 1024),
    "prefetch": whole(1, MOST_PREFETCHED),
    "threads_per_worker": whole(1, 256),
    "timeout": real(0, 10**9, "seconds; 0 waits forever"),
    "worker_type": one_of(*WORKER_TYPES),
    "start_method": one_of(*START_METHODS),
    "check_every": whole(0, words="batches; 0 never compares"),
    "content_hash": whole(0, words="samples; 0 reads none"),
    "collate_fn": or_none(FUNCTION),
    "worker_init_fn": or_none(FUNCTION),
    "mixup_func": Rule(
        "a function, a BatchTransform or None",
        lambda value: value is None or callable(value) or isinstance(value, BatchTransform),
    ),
    "batch_transform": or_none(
        Rule("a BatchTransform, such as Mixup", lambda value: isinstance(value, BatchTransform))
    ),
    "seed": INT,
    "fields": or_none(FIELD_NAMES),
}


def read_ahead_of_all(batches: int, workers: int) -> int:
    """The batches that all workers together read ahead, if each worker reads `batches` ahead."""
    return min(batches * max(1, workers), MOST_PREFETCHED)
