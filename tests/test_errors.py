from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.config.lazy_config import load_config
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
from libai_data.errors.working_directory import working_directory


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


@pytest.mark.parametrize("exists_again", [False, True])
def test_a_deleted_working_directory_is_an_error_that_says_what_to_do(
    exists_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert working_directory() == str(folder)
    folder.rmdir()
    if exists_again:
        folder.mkdir()
    with pytest.raises(ConfigError, match=f"the working directory {folder} was deleted") as error:
        working_directory()
    assert (f"cd {folder}" if exists_again else "cd FOLDER") in str(error.value)
    with pytest.raises(ConfigError, match="was deleted"):
        load_config("config.py")
