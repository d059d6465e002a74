from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from libai_data.delivery import to_global
from libai_data.engine.batches import StepInputs, call_get_batch, join_inputs
from libai_data.errors import ConfigError, SchemaError
from libai_data.structures import DistTensorData, Instance


@pytest.mark.parametrize(
    ("get_batch", "expected"),
    [
        # LiBai's own, the same under other names, and one that takes what comes.
        (lambda data, input_placement_device="cuda", mixup_func=None: (data, input_placement_device, mixup_func), 3),
        (lambda batch, where, mix: (batch, where, mix), 3),
        (lambda data, **options: (data, options["input_placement_device"], options["mixup_func"]), 3),
        # The one that LiBai's guide shows, and one as short as possible.
        (lambda data, mixup_func=None: (data, "cpu", mixup_func), 3),
        (lambda batch: (batch,), 1),
    ],
)
def test_get_batch_is_called_with_the_arguments_it_takes(get_batch: Any, expected: int) -> None:
    @functools.wraps(get_batch)
    def as_a_dict(*arguments: Any, **named: Any) -> dict[str, Any]:
        return {"got": get_batch(*arguments, **named)}

    assert call_get_batch(as_a_dict, "d", "cpu", max) == {"got": ("d", "cpu", max)[:expected]}


def test_get_batch_must_return_a_dict_and_a_loader_have_batches() -> None:
    with pytest.raises(SchemaError, match="returned a list"):
        call_get_batch(lambda data: [data], "d", "cpu")  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"train loader \(list\) yields no batch"):
        StepInputs([]).next()


def test_a_loader_is_not_touched_before_the_first_step() -> None:
    started = []

    class Loader:
        def __iter__(self) -> Iterator[int]:
            started.append(True)
            return iter([1])

    feed = StepInputs(Loader())
    assert not started
    feed.next()
    assert started


def _batch(first: int) -> Instance:
    rows = np.arange(first, first + 2, dtype=np.float32)
    return Instance(
        x=DistTensorData(flow.from_numpy(np.stack([rows, rows], axis=1)), ["split_0", "broadcast"], 0),
        y=DistTensorData(rows, ["split_0", "broadcast"], -1),
    )


def test_micro_batches_of_any_kind_are_joined_row_by_row_with_their_layouts() -> None:
    joined = StepInputs([_batch(0), _batch(2), _batch(4)]).joined(3, lambda data: to_global(data), "cpu")
    assert joined["x"].numpy()[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert joined["y"].numpy().tolist() == [0, 1, 2, 3, 4, 5]
    assert all(each.is_global and each.sbp == joined["x"].sbp for each in joined.values())
    placement, sbp = flow.placement("cpu", [0]), [flow.sbp.split(0)]
    parts: list[dict[str, Any]] = [{"x": flow.tensor([i, i + 1]).to_global(placement, sbp)} for i in (0, 2)]
    assert join_inputs(parts)["x"].numpy().tolist() == [0, 1, 2, 3]
    inputs = StepInputs([(1.0, 2.0), (3.0, 4.0)])
    joined = inputs.joined(2, lambda data: {"x": flow.tensor(data)}, "cpu")
    assert joined["x"].numpy().tolist() == [1, 2, 3, 4]
    assert inputs.seconds > 0


def test_a_part_of_a_field_stays_a_part_when_it_changes() -> None:
    part = DistTensorData(flow.ones(2, 3), ["split_0", "split_1"], -1)
    part._is_part = True  # as a loader marks the part that the tensor axis needs
    batch = Instance(x=part)
    batch["x"] = batch["x"] * 2
    assert batch.x._is_part and batch.x.sbp_list == ["split_0", "split_1"] and batch.x.placement_idx == -1
    assert not Instance.stack([Instance(x=DistTensorData(1))]).x._is_part


@pytest.mark.parametrize("same", [True, False])
def test_ranks_that_read_the_same_rows_are_refused(monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    """As on two data-parallel ranks; on each of them, a rank of another pipeline stage has no part of the inputs."""

    def told(own: np.ndarray) -> np.ndarray:
        return np.array([own, [0, 0, 7], own + [1, 0, 0 if same else 1], [1, 0, 7]])

    monkeypatch.setattr("libai_data.engine.batches.get_data_parallel_size", lambda: 2)
    monkeypatch.setattr("libai_data.engine.batches.gather_words", told)
    layouts = (flow.sbp.split(0), flow.sbp.broadcast)
    rows, shared = ({"x": flow.arange(6).view(2, 3).to_global(flow.placement("cpu", [0]), [sbp])} for sbp in layouts)
    inputs = StepInputs([None, None])
    message = r"all 2 data-parallel ranks got the same rows in the first batch of the train loader \(list\)"
    with pytest.raises(ConfigError, match=message) if same else nullcontext():
        inputs.joined(1, lambda data: {"rows": rows, **shared}, "cpu")
    inputs.joined(1, lambda data: {"rows": rows}, "cpu")
