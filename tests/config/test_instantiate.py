from __future__ import annotations

import dataclasses
import functools
import signal
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, ListConfig, OmegaConf

from libai_data.config import LazyCall, check_targets, instantiate
from libai_data.data.transforms import Mixup, RandAugment, RandomFlip
from libai_data.errors import ConfigError, SchemaError
from libai_data.loader import Padding
from tests.properties import examples


class Reader:
    def __init__(self, root: str, transform: Any = None, options: Any = None) -> None:
        self.root, self.transform, self.options = root, transform, options


class Scale:
    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor


@dataclasses.dataclass(frozen=True)
class Size:
    height: int = 1
    width: int = 2


def record(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"args": args, **kwargs}


def fail(kind: Any = RuntimeError) -> None:
    raise kind("out of luck")


def _wrapper(function: Any) -> Any:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("cfg", None)
        return function(*args, **kwargs)

    return wrapped


@_wrapper
def wrapped_reader(root: str) -> str:
    return root


def test_lazy_calls_within_calls_lists_and_sections_are_made() -> None:
    cfg = LazyCall(record)(
        a=LazyCall(Scale)(factor=2.0), b=[LazyCall(Scale)(), 3], c={"d": {"e": LazyCall(Scale)(factor=5.0)}}
    )
    built = instantiate(cfg)
    assert built["a"].factor == 2.0
    assert isinstance(built["b"][0], Scale) and built["b"][1] == 3
    assert built["c"].d.e.factor == 5.0


def test_the_config_stays_as_it_was() -> None:
    cfg = LazyCall(record)(a=LazyCall(Scale)(), b=[LazyCall(Scale)()])
    before = OmegaConf.to_container(cfg)
    instantiate(cfg, a=3, z=4)
    assert OmegaConf.to_container(cfg) == before


@pytest.mark.parametrize("target", [OrderedDict, "collections.OrderedDict", functools.partial(OrderedDict), dict])
def test_a_target_may_be_a_class_a_name_or_a_partial(target: Any) -> None:
    assert instantiate(LazyCall(target)(factor=3.0)) == {"factor": 3.0}


def test_a_target_may_be_a_dataclass_even_a_local_one_or_itself_a_lazy_call() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    assert instantiate(LazyCall(Size)(height=7)) == Size(7, 2)
    assert instantiate(LazyCall(Local)(x=5)) == Local(5)
    assert instantiate(LazyCall(LazyCall(scale_maker)())(factor=4.0)).factor == 4.0


def scale_maker() -> Any:
    return Scale


def test_objects_and_dataclasses_in_a_config_arrive_as_they_are() -> None:
    thing = object()
    built = instantiate(LazyCall(record)(thing=thing, kind=Scale, function=fail))
    assert built["thing"] is thing and built["kind"] is Scale and built["function"] is fail
    built = instantiate(LazyCall(record)(size=Size(3, 4), sizes=[Size(5)], inside={"x": Size(6)}))
    assert built["size"] == Size(3, 4)
    assert built["sizes"] == [Size(5)]
    assert built["inside"].x == Size(6)


@pytest.mark.parametrize("value", [None, 3, "text", 1.5, [1, 2], {"a": 1}, object(), Size()])
def test_what_describes_no_call_is_returned_as_it_is(value: Any) -> None:
    assert instantiate(value) is value


def test_lists_arrive_as_plain_lists_and_sections_with_attributes() -> None:
    built = instantiate(LazyCall(record)(sizes=(1, [2, 3]), options={"depth": 2, "names": ["a"]}))
    assert type(built["sizes"]) is list and type(built["sizes"][1]) is list
    assert isinstance(built["options"], DictConfig) and built["options"].depth == 2
    assert type(instantiate(ListConfig([1, 2]))) is list


def test_interpolations_arrive_resolved() -> None:
    call = LazyCall(record)(x="${size}", xs=["${size}"])
    cfg = OmegaConf.create({"size": 5, "call": call}, flags={"allow_objects": True})
    assert instantiate(cfg.call) == {"args": (), "x": 5, "xs": [5]}


def test_not_recursive_leaves_the_arguments_of_that_call_unmade() -> None:
    inner = LazyCall(Scale)(factor=2.0)
    for built in (
        instantiate(LazyCall(record)(a=inner, b=[inner], _recursive_=False)),
        instantiate(LazyCall(record)(a=inner, b=[inner]), _recursive_=False),
    ):
        assert built["a"] == inner and isinstance(built["a"], DictConfig)
        assert type(built["b"]) is list and built["b"] == [inner]
    inner = LazyCall(record)(a=LazyCall(Scale)(), _recursive_=False)
    built = instantiate(LazyCall(record)(inner=inner, b=LazyCall(Scale)()))
    assert isinstance(built["inner"]["a"], DictConfig) and isinstance(built["b"], Scale)


def test_arguments_given_now_win_and_mappings_merge() -> None:
    big: list[int] = [1, 2]
    cfg = LazyCall(record)(a=1, options={"x": 1, "y": 2})
    built = instantiate(cfg, "first", a=big, options={"y": 3})
    assert built["args"] == ("first",) and built["a"] is big
    assert built["options"] == {"x": 1, "y": 3}
    assert instantiate(cfg, a=LazyCall(Scale)(factor=9.0))["a"].factor == 9.0
    replaced = instantiate(LazyCall(record)(a=LazyCall(Reader)(root="x")), a=LazyCall(Scale)(factor=9.0))
    assert replaced["a"].factor == 9.0


def test_an_open_value_may_be_filled_in_now_and_is_refused_otherwise() -> None:
    cfg = LazyCall(Reader)(root="???")
    assert instantiate(cfg, root="here").root == "here"
    with pytest.raises(ConfigError, match="root"):
        instantiate(cfg)


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Reader failed: .* missing .* argument: 'root'"):
        instantiate(LazyCall(Reader)(transform=1))
    assert instantiate(LazyCall(Reader)(), "root by place").root == "root by place"


def test_arguments_of_a_wrapper_are_not_those_of_what_it_wraps() -> None:
    assert instantiate(LazyCall(wrapped_reader)(root="r", cfg={"a": 1})) == "r"


def test_a_failing_target_is_named_with_its_place_and_chained() -> None:
    cfg = OmegaConf.create({"a": {"b": [LazyCall(fail)()]}}, flags={"allow_objects": True})
    with pytest.raises(ConfigError, match=r"a\.b\.0: calling .*fail.* failed: RuntimeError: out of luck") as raised:
        instantiate(cfg.a.b)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert raised.value.config_path == "a.b.0"


def test_an_error_passes_through_outer_builders_without_being_told_twice() -> None:
    cfg = LazyCall(build_it)(part=LazyCall(fail)(), _recursive_=False)
    with pytest.raises(ConfigError) as raised:
        instantiate(cfg)
    assert str(raised.value).count("failed") == 1 and "part: calling" in str(raised.value)


def build_it(part: Any) -> Any:
    return instantiate(part)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module.Thing", "there is no module 'no_such_module'"),
        ("collections.OrderedDic", "collections has no 'OrderedDic'. Did you mean 'OrderedDict'"),
        ("libai_data.errors.nearest.x", "libai_data.errors.nearest has no 'x'"),
        ("libai_data.", "not a dotted name"),
        ("math.pi", "cannot be called"),
    ],
)
def test_a_target_that_is_not_there_is_said_to_be_so(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match="_target_") as raised:
        instantiate(LazyCall(target)())
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LazyCall(3), "needs something to call"),
        (lambda: LazyCall(Scale)(2.0), "keyword arguments only"),
        (lambda: instantiate(OmegaConf.create({"a": 1}), b=2), "has no _target_"),
        (lambda: instantiate(LazyCall(record)(_recursive_="no")), "_recursive_ must be true or false; found 'no'"),
    ],
)
def test_what_describes_no_call_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_check_targets_builds_nothing_and_leaves_open_values_and_references() -> None:
    cfg = OmegaConf.create({"a": [{"b": LazyCall(fail)()}], "open": "???", "ref": "${nowhere}"})
    check_targets(cfg)
    check_targets(LazyCall(Reader)())


def _is_plain(text: str) -> bool:
    return "${" not in text and text != "???"


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text().filter(_is_plain),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=examples(60))
@given(st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True).filter(lambda k: k != "args"), _values, max_size=4))
def test_any_values_reach_the_target_equal(kwargs: dict[str, Any]) -> None:
    assert instantiate(LazyCall(record)(**kwargs)) == {"args": (), **kwargs}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            LazyCall(record)(dataset=LazyCall(Reader)(root="x", transfrom=None)),
            r"^a\.b\.dataset\.transfrom: .*Did you mean 'transform'\?",
        ),
        (LazyCall(record)(c=[3, LazyCall(Scale)(faktor=1)]), r"a\.b\.c\.1\.faktor: .*Scale.* Did you mean 'factor'"),
        (LazyCall(RandAugment)(number=1.5), r"a\.b\.number is 1\.5; it must be an int\."),
        (LazyCall(RandAugment)(number=True), r"a\.b\.number is True"),
        (LazyCall(Mixup)(num_classes=float("inf")), r"a\.b\.num_classes is inf; it must be an int"),
        (LazyCall(RandomFlip)(p="x"), r"a\.b\.p is 'x'; it must be a number\."),
        (LazyCall(RandomFlip)(vertical=1), r"a\.b\.vertical is 1; it must be True or False\."),
        (LazyCall(Padding)(max_length="x"), r"a\.b\.max_length is 'x'; it must be an int or None\."),
    ],
)
def test_keywords_must_be_known_and_their_values_of_the_type_of_their_argument(call: Any, message: str) -> None:
    cfg = OmegaConf.create({"a": {"b": call}}, flags={"allow_objects": True})
    with pytest.raises(ConfigError, match=message):
        check_targets(cfg)
    with pytest.raises(ConfigError, match=message):
        instantiate(cfg.a.b)


def test_an_error_of_another_package_is_told_with_the_plain_arguments_of_the_call() -> None:
    call = LazyCall(np.linspace)(start=0.5, stop=[1], num=-1, dtype="float32")
    words = r"Number of samples, -1, .* \(called with start=0\.5, num=-1, dtype='float32'\)$"
    with pytest.raises(ConfigError, match=words):
        instantiate(call)


def test_errors_of_ours_keep_their_class_and_others_are_named_with_the_key() -> None:
    with pytest.raises(SchemaError, match=r"calling .*fail.* failed: out of luck"):
        instantiate(LazyCall(fail)(kind=SchemaError))
    for kind in (SystemExit, KeyError, StopIteration):
        with pytest.raises(ConfigError, match=rf"inner: calling .*fail failed: {kind.__name__}"):
            instantiate(LazyCall(dict)(inner=LazyCall(fail)(kind=kind)))


def signalled(number: int) -> None:
    signal.raise_signal(number)


def test_sys_exit_in_a_signal_handler_is_no_error_of_the_call() -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: fail(SystemExit))
    try:
        with pytest.raises(SystemExit):
            instantiate(LazyCall(dict)(inner=LazyCall(signalled)(number=signal.SIGUSR1)))
    finally:
        signal.signal(signal.SIGUSR1, before)
