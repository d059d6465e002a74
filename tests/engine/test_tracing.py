"""What a graph loses of the Python code of `forward` is refused, or warned of."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from libai_data.engine.graph import GraphBase
from libai_data.errors import ConfigError
from tests.engine.test_graph import inputs_of
from tests.engine.tiny import FEATURES, GRAPH_BALLAST, TinyModel, on_one_rank


class Counting(TinyModel):
    def __init__(self, ballast: int, name: str) -> None:
        super().__init__(ballast=ballast)
        self.register_buffer("buffer", flow.zeros(1))
        self.plain, self.name = 0, name

    def forward(self, points: Any, labels: Any = None) -> Any:
        setattr(self, self.name, getattr(self, self.name) + 1)
        return TinyModel.forward(self, points, labels)


def test_what_forward_assigns_is_not_lost_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    def run(name: str) -> None:
        model = on_one_rank(Counting(GRAPH_BALLAST, name))
        GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.1))(**inputs_of(TinyModel, 4))

    with pytest.raises(ConfigError, match=r"forward assigns model\.buffer, .* so the buffer would not change"):
        run("buffer")
    run("plain")
    assert "forward assigns model.plain, but graph mode" in caplog.text


class WithoutGradient(TinyModel):
    def forward(self, points: Any, labels: Any = None) -> Any:
        with flow.no_grad():
            points = points + self.first(points).mean()
        return TinyModel.forward(self, points, labels)


@pytest.mark.parametrize("kind", [WithoutGradient, TinyModel])
def test_the_log_warns_of_no_grad_in_forward(kind: type[TinyModel], caplog: pytest.LogCaptureFixture) -> None:
    model = on_one_rank(kind(ballast=GRAPH_BALLAST))
    GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.1))(**inputs_of(TinyModel, 4))
    assert ("forward uses no_grad, but graph mode" in caplog.text) == (kind is WithoutGradient)


class InPlace(TinyModel):
    change: Any = None

    def __init__(self, ballast: int) -> None:
        super().__init__(ballast=ballast)
        self.norm = flow.nn.BatchNorm1d(FEATURES)
        self.register_buffer("seen", flow.zeros(1, FEATURES))

    def forward(self, points: Any, labels: Any = None) -> Any:
        InPlace.change(self.seen, points[0:1])
        return TinyModel.forward(self, self.norm(points) + self.seen, labels)


def add_to_alias(buffer: Any, row: Any) -> None:
    alias = buffer
    alias += row


def set_items(buffer: Any, row: Any) -> None:
    buffer[:, :2] = row[:, :2]


@pytest.mark.parametrize(
    ("change", "is_change"),
    [
        (lambda buffer, row: buffer.add_(1), True),
        (lambda buffer, row: buffer.mul_(0.9).add_(row), True),
        (add_to_alias, True),
        (set_items, True),
        (lambda buffer, row: buffer + row, False),
        (lambda buffer, row: (buffer + 1).add_(row), False),
    ],
)
def test_a_buffer_that_forward_changes_in_place_is_refused(change: Any, is_change: bool) -> None:
    InPlace.change = change
    model = on_one_rank(InPlace(GRAPH_BALLAST))
    graph = GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.1))
    if is_change:
        with pytest.raises(ConfigError, match=r"^forward changes model\.seen in place, .* Set graph\.enabled=False"):
            graph(**inputs_of(TinyModel, 4))
    else:
        assert np.isfinite(graph(**inputs_of(TinyModel, 4))["loss"].numpy())


class Draws(TinyModel):
    draw: Any = None

    def forward(self, points: Any, labels: Any = None) -> Any:
        return TinyModel.forward(self, points * Draws.draw(), labels)


@pytest.mark.parametrize("is_train", [False, True])
@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "random"),
        (np.random.rand, "numpy.random"),
        (lambda: flow.rand(1, placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast), ""),
    ],
)
def test_the_log_warns_of_random_numbers_that_a_graph_keeps(
    draw: Any, name: str, is_train: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Draws, "draw", draw)
    model = on_one_rank(Draws(ballast=GRAPH_BALLAST))
    graph = GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.0) if is_train else None, is_train=is_train)
    first, second = (next(iter(graph(**inputs_of(TinyModel, 4)).values())).numpy() for _ in range(2))
    assert (first == second).all() == bool(name)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(name)
    assert f"forward draws random numbers from {name}, but graph mode" in caplog.text or not name
