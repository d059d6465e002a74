from __future__ import annotations

from functools import partial
from typing import Any, Callable

import numpy as np
import oneflow as flow
import pytest

from libai_data.delivery import check_forward_fields
from libai_data.delivery.contract import signature_of
from libai_data.delivery.to_global import GlobalTuple
from libai_data.errors import SchemaError
from libai_data.structures import DistTensorData


def forward(images: Any, labels: Any = None) -> None: ...


def takes_anything(images: Any, **others: Any) -> None: ...


def keyword_only(*, images: Any, labels: Any = None) -> None: ...


def open_ended(*arguments: Any, **others: Any) -> None: ...


class Model(flow.nn.Module):
    def forward(self, images: Any, labels: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("taker", "names"),
    [
        (forward, ["images"]),
        (forward, ["labels", "images"]),
        (keyword_only, ["images", "labels"]),
        (takes_anything, ["images", "whatever"]),
        (open_ended, ["whatever"]),
        (open_ended, []),
        (partial(forward, labels=1), ["images"]),
        (Model().forward, ["images", "labels"]),
    ],
)
def test_fields_that_are_forwards_arguments_pass(taker: Callable[..., Any], names: list[str]) -> None:
    check_forward_fields(taker, names)
    check_forward_fields(taker, iter(names))


@pytest.mark.parametrize("taker", [forward, keyword_only, Model().forward])
def test_a_field_that_forward_does_not_take_is_named_with_the_nearest(taker: Callable[..., Any]) -> None:
    with pytest.raises(
        SchemaError, match=r"forward has no argument 'label' .*'images', 'labels'.*Did you mean 'labels'"
    ):
        check_forward_fields(taker, ["images", "label"])


def test_positional_only_arguments_are_named() -> None:
    def unnamed(images: Any, /, *others: Any, **fields: Any) -> None:
        pass

    def has_default(images: Any = None, /, *, labels: Any) -> None:
        pass

    with pytest.raises(SchemaError, match=r"positional-only arguments, \['images'\], .* remove '/'"):
        check_forward_fields(unnamed, ["images"])
    check_forward_fields(has_default, ["labels"])


@pytest.mark.parametrize("taker", [forward, takes_anything, keyword_only, Model().forward])
def test_an_argument_that_is_missing_is_named_with_the_nearest(taker: Callable[..., Any]) -> None:
    with pytest.raises(SchemaError, match=r"needs 'images', .*only \['image'\].*Did you mean 'image'"):
        check_forward_fields(taker, ["image"])


def test_all_problems_are_named_at_once_and_values_without_names_are_to_be_named() -> None:
    with pytest.raises(SchemaError) as error:
        check_forward_fields(forward, ["picture", "label"])
    assert all(f"'{name}'" in str(error.value) for name in ("picture", "label", "images"))
    with pytest.raises(SchemaError, match=r"tuples of 2 value.*\['images', 'labels'\], with fields="):
        check_forward_fields(forward, GlobalTuple({"0": 1, "1": 2}))
    check_forward_fields(forward, GlobalTuple(images=1, labels=2))


def test_numpy_and_oneflow_tensors_of_the_same_kind_count_as_the_same() -> None:
    array = np.zeros((2, 3), np.float32)
    numpy_fields = {"x": DistTensorData(array)}
    assert signature_of(numpy_fields) == signature_of({"x": DistTensorData(flow.from_numpy(array))})
