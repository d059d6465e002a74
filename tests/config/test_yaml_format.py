from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import math
import pathlib
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from libai_data.config import LazyCall, default_graph, default_train, instantiate
from libai_data.config.config_files import as_config
from libai_data.config.naming import describe, dotted_name, locate
from libai_data.config.yaml_format import from_yaml, to_yaml
from libai_data.errors import ConfigError
from tests.properties import examples


def there_and_back(cfg: Any) -> Any:
    return as_config(from_yaml(to_yaml(cfg), "test.yaml"), "test.yaml")


_texts = st.text(st.characters(blacklist_categories=["Cs"])) | st.sampled_from(
    [
        *("1e-4", "null", "~", "yes", "on", "1:30", "2024-01-01", "<<", "=", "???", "0x1f", "1_000", "", " "),
        *("!name x", "- a", "${a.b}", "!", "a\x85b", "\u2028", "a\r\nb "),
    ]
)
_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.binary(max_size=5) | _texts
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts | st.integers(), inner, max_size=3),
    max_leaves=15,
)


@settings(max_examples=examples(60))
@given(st.dictionaries(_texts | st.integers() | st.booleans(), _values, max_size=4))
def test_any_plain_config_comes_back_equal_with_its_types(values: Any) -> None:
    found = from_yaml(to_yaml(values), "test.yaml")
    assert found == values
    assert repr(found) == repr(values)


_keys = st.from_regex(r"[a-z]{1,5}", fullmatch=True).filter(lambda key: key != "self")
_plain_texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="$?"))
_calls = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | _plain_texts
    | st.sampled_from([len, math.sin]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(_keys, inner, max_size=2)
        | st.builds(
            lambda target, kwargs: LazyCall(target)(**kwargs),
            st.sampled_from([dict, collections.OrderedDict, "builtins.dict"]),
            st.dictionaries(_keys, inner, max_size=2),
        )
    ),
    max_leaves=8,
)


@settings(max_examples=examples(60))
@given(st.dictionaries(_keys, _calls, max_size=3))
def test_any_lazy_config_comes_back_building_the_same_and_saves_the_same_again(kwargs: Any) -> None:
    cfg = LazyCall(dict)(**kwargs)
    loaded = there_and_back(cfg)
    assert instantiate(loaded) == instantiate(cfg)
    assert to_yaml(loaded) == to_yaml(cfg)


def test_the_default_sections_come_back_equal() -> None:
    for section in (default_train(), default_graph()):
        assert there_and_back(section) == section


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Holder:
    class Inner(enum.Enum):
        A = "a"

    @classmethod
    def make(cls) -> Holder:
        return cls()


def module_function() -> None:
    pass


@dataclasses.dataclass
class Size:
    height: int = 1
    inside: Any = None
    area: int = dataclasses.field(init=False, default=0)


@pytest.mark.parametrize(
    "value", [Colour.RED, Level.LOW, Holder, Holder.Inner.A, module_function, np.float32, len, Size]
)
def test_named_objects_survive(value: Any) -> None:
    assert from_yaml(to_yaml({"x": value}), "test.yaml")["x"] is value


def test_methods_of_classes_paths_and_numpy_scalars_survive() -> None:
    loaded = from_yaml(to_yaml({"make": Holder.make, "path": pathlib.Path("/a/b")}), "test.yaml")
    assert loaded == {"make": Holder.make, "path": pathlib.Path("/a/b")}
    loaded = from_yaml(to_yaml({"a": np.float64(1e-4), "b": np.int64(3), "c": np.bool_(True)}), "test.yaml")
    assert loaded == {"a": 1e-4, "b": 3, "c": True} and type(loaded["a"]) is float


def test_dtypes_of_oneflow_survive() -> None:
    flow = pytest.importorskip("oneflow")
    text = to_yaml(
        DictConfig({"dtype": flow.float16, "optim": LazyCall(flow.optim.AdamW)(lr=1e-3)}, flags={"allow_objects": True})
    )
    assert "!name 'oneflow.float16'" in text
    loaded = as_config(from_yaml(text, "test.yaml"), "test.yaml")
    assert loaded.dtype is flow.float16
    assert locate(loaded.optim._target_) is flow.optim.AdamW


class Range(NamedTuple):
    first: int
    last: Any = None


def test_named_tuples_come_back_as_calls_that_build_them() -> None:
    loaded = there_and_back({"args": LazyCall(dict)(range=Range(1, Range(2)))})
    assert instantiate(loaded.args) == {"range": Range(1, Range(2))}
    assert type(instantiate(loaded.args)["range"].last) is Range


def test_dataclass_instances_come_back_as_calls_that_build_them() -> None:
    for cfg in (
        {"size": Size(3, inside=Size(4))},
        DictConfig({"size": Size(3, inside=Size(4))}, flags={"allow_objects": True}),
    ):
        loaded = there_and_back(cfg)
        assert instantiate(loaded.size) == Size(3, inside=Size(4))


def test_interpolations_and_open_values_stay_as_written() -> None:
    cfg = OmegaConf.create({"a": 1, "b": "${a}", "c": "???", "d": {"e": "${nowhere.x}"}, "f": "${d}"})
    assert OmegaConf.to_container(there_and_back(cfg)) == OmegaConf.to_container(cfg)


def test_what_has_no_name_is_noted_and_refused_when_loaded(caplog: pytest.LogCaptureFixture) -> None:
    def nested() -> None:
        pass

    for value in (lambda: 1, nested, np.zeros(2), object()):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            text = to_yaml(DictConfig({"a": {"b": [value]}, "kept": 1}, flags={"allow_objects": True}))
        assert "a.b.0" in caplog.text and "!unsaved" in text and "kept: 1" in text
        with pytest.raises(ConfigError, match="could not be saved"):
            from_yaml(text, "test.yaml")


def test_a_note_says_where_a_lambda_was_written(caplog: pytest.LogCaptureFixture) -> None:
    to_yaml({"f": lambda: 1})
    assert "test_yaml_format.py, line" in caplog.text


def test_objects_shared_in_a_config_are_written_out_each_time() -> None:
    shared = [1, 2]
    assert "&" not in to_yaml({"a": shared, "b": shared, "f": len, "g": len})


def test_names_are_the_shortest_that_lead_to_the_object() -> None:
    assert dotted_name(LazyCall) == "libai_data.LazyCall"
    assert dotted_name(collections.OrderedDict) == "collections.OrderedDict"
    assert dotted_name("text") is None
    assert describe(types.FunctionType) == "function"
