"""Each argument of builders, loaders and samplers works with an odd value, or is refused by an error that names it."""

from __future__ import annotations

import inspect
import math
from typing import Any, Callable

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libai_data.data.samplers import CyclicSampler, SingleRoundSampler
from libai_data.delivery.build import build_nlp_test_loader, build_nlp_train_loader, build_nlp_train_val_test_loader
from libai_data.errors import ConfigError
from libai_data.iterables.from_iterable import from_iterable
from libai_data.loader.batch_loader import BatchLoader
from tests.engine.tiny import TinyDataset

DATASET = TinyDataset(40)
LOADER = (
    "num_workers prefetch timeout worker_type start_method check_every content_hash seed collate_fn mixup_func "
    "worker_init_fn threads_per_worker"
)
POLICY = "layouts on_error quarantine_file replacement_budget"


def train(**changes: Any) -> Any:
    return build_nlp_train_loader(**{"dataset": DATASET, "train_batch_size": 4, "num_workers": 0, **changes})[0]


def one_round(**changes: Any) -> Any:
    return build_nlp_test_loader(**{"dataset": DATASET, "test_batch_size": 4, "num_workers": 0, **changes})


def three(**changes: Any) -> Any:
    given: dict[str, Any] = {"splits": [[7, 2, 1]], "weights": None, "train_val_test_num_samples": None}
    given.update(dataset=DATASET, train_batch_size=4, test_batch_size=2, num_workers=0)
    return build_nlp_train_val_test_loader(**{**given, **changes})[0]


def loader(**changes: Any) -> Any:
    return BatchLoader(DATASET, CyclicSampler(DATASET, 4), **changes)


def cyclic(**changes: Any) -> Any:
    return BatchLoader(DATASET, CyclicSampler(**{"dataset": DATASET, "micro_batch_size": 4, **changes}))


def single(**changes: Any) -> Any:
    return BatchLoader(DATASET, SingleRoundSampler(**{"dataset": DATASET, "micro_batch_size": 4, **changes}))


def samples(**changes: Any) -> Any:
    return from_iterable([{"x": np.ones(3)}] * 40, **{"micro_batch_size": 4, **changes})


def stream(**changes: Any) -> Any:
    return from_iterable(lambda: iter([{"x": np.ones(3)}] * 40), **{"micro_batch_size": 4, **changes})


BUILDER = "sampler dataset_mixer readers"
SAMPLER = "micro_batch_size shuffle data_parallel_rank data_parallel_size seed drop_last"
ITERABLE = "micro_batch_size fields batches ends shuffle readers"
ARGUMENTS: list[tuple[Callable[..., Any], str]] = [
    (function, name)
    for function, names in (
        (train, f"train_batch_size consumed_samples {BUILDER} {LOADER} {POLICY}"),
        (one_round, f"test_batch_size {BUILDER} {LOADER} {POLICY}".replace("mixup_func ", "")),
        (three, f"train_batch_size test_batch_size splits weights train_sampler test_sampler {LOADER} {POLICY}"),
        (loader, f"batch_transform fields {LOADER} {POLICY}"),
        (cyclic, f"consumed_samples {SAMPLER}"),
        (single, SAMPLER),
        (samples, f"{ITERABLE} {LOADER} {POLICY}"),
        (stream, f"{ITERABLE} {LOADER} {POLICY}"),
    )
    for name in names.split()
]
ODD = st.sampled_from([0, -1, 1.5, 2.0, 2**70, math.inf, math.nan, None, "x", True, [], [0.5], {"a": 1}])


@settings(max_examples=100)
@given(argument=st.sampled_from(ARGUMENTS), value=ODD)
@example(argument=(samples, "fields"), value=[])
def test_an_odd_argument_works_or_is_refused_by_an_error_that_names_it(
    argument: tuple[Callable[..., Any], str], value: Any
) -> None:
    function, name = argument
    if name == "quarantine_file" and isinstance(value, str):
        return  # a file, which it would write
    try:
        made = function(**{name: value})
    except ConfigError as error:
        assert name in str(error)
        return
    try:
        assert len(next(iter(made)).get_fields()) >= 1
    finally:
        made.close()


def test_every_argument_of_the_loader_is_tried() -> None:
    tried = {name for function, name in ARGUMENTS if function is loader}
    assert tried == set(inspect.signature(BatchLoader).parameters) - {"dataset", "batch_sampler"} - {"tensor_part"}
