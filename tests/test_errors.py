from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.errors import (
    CheckpointError,
    ConfigError,
    DataPipelineError,
    FormatError,
    MeshError,
    NonFiniteLossError,
    SampleError,
    SchemaError,
    StorageError,
    nearest,
)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ConfigError, ValueError),
        (MeshError, ValueError),
        (SchemaError, ValueError),
        (FormatError, ValueError),
        (SampleError, RuntimeError),
        (CheckpointError, RuntimeError),
        (NonFiniteLossError, FloatingPointError),
        (StorageError, OSError),
    ],
)
def test_each_error_is_caught_as_ours_and_as_the_builtin_that_fits(
    error: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(error, DataPipelineError)
    assert issubclass(error, builtin)


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("train_iters", ["train_iter", "train_epoch", "seed"], " Did you mean 'train_iter'?"),
        ("cyclicsampler", ["CyclicSampler", "SingleRoundSampler"], " Did you mean 'CyclicSampler'?"),
        ("banana", ["lr", "seed"], ""),
        ("anything", [], ""),
        (11, [1111, "x"], " Did you mean '1111'?"),
    ],
)
def test_nearest_suggests_the_known_name_that_resembles_in_any_case(name: Any, known: list[Any], hint: str) -> None:
    assert nearest(name, known) == hint


@given(st.text(min_size=1), st.lists(st.text(min_size=1)))
def test_nearest_only_ever_suggests_a_known_name(name: str, known: list) -> None:
    hint = nearest(name, known)
    assert hint == "" or any(hint == f" Did you mean '{candidate}'?" for candidate in known)
