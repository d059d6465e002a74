"""The digest of rows: each byte of each row counts, and how they follow each other; memory layout and notes do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.iterables.digest import running_digest

SIZES = st.sampled_from([1, 7, 100, 1024, 1025, 5000, 65_536, 65_543, 140_001])


class Plain:
    """A sample that only its user's collator understands."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.itself = self


@settings(max_examples=60)
@given(size=SIZES, place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_bit_counts(size: int, place: float, bit: int) -> None:
    row = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    changed = row.copy()
    changed[int(place * size)] ^= 1 << bit
    assert running_digest("", {"x": row}) == running_digest("", {"x": row.copy()})
    for other in (changed, row[::-1].copy(), row[:-1].copy(), row.astype(np.int16)):
        if other.tobytes() != row.tobytes():
            assert running_digest("", {"x": row}) != running_digest("", {"x": other})
    assert running_digest("", row.tobytes()) != running_digest("", changed.tobytes())


@settings(max_examples=20)
@given(size=SIZES)
def test_rows_in_another_order_differ(size: int) -> None:
    row, other = np.zeros(size), np.ones(size)
    assert running_digest(running_digest("", row), other) != running_digest(running_digest("", other), row)


def test_neither_how_a_row_lies_in_memory_counts_nor_what_is_not_used() -> None:
    row = np.arange(3000).reshape(30, 100)
    spread = np.asfortranarray(row)
    bytes_before = np.frombuffer(b"?" + row.tobytes(), np.uint8)[1:].view(np.int64).reshape(30, 100)
    assert running_digest("", spread) == running_digest("", row) == running_digest("", bytes_before)
    used = {"x": np.arange(3)}
    assert running_digest("", used) == running_digest("", {**used, "__key__": "elsewhere"})
    assert running_digest("", used, ["x"]) == running_digest("", {**used, "read_at": 0.1}, ["x"])
    assert running_digest("", used) != running_digest("", {**used, "read_at": 0.1})


@pytest.mark.parametrize(
    "make",
    [
        lambda number: {"text": "a" * 5000 + str(number)},
        lambda number: {"raw": b"a" * 5000 + bytes([number])},
        lambda number: (1, [2, {"deep": number}]),
        lambda number: [0] * 1000 + [number],
        lambda number: {"words": np.array(["a", "b" * number])},
        lambda number: {"objects": np.array([None, number], dtype=object)},
        lambda number: {"when": np.datetime64("2020-01-01") + number},
        lambda number: Plain(np.full(3, number)),
        lambda number: [np.zeros(number), np.zeros(3 - number)],
    ],
)
def test_every_form_of_a_row_counts(make: Any) -> None:
    assert running_digest("", make(1)) == running_digest("", make(1))
    assert running_digest("", make(1)) != running_digest("", make(2))


def test_a_global_tensor_counts_without_asking_other_ranks() -> None:
    def made(number: int) -> Any:
        return flow.full((2, 3), number, placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast)

    assert running_digest("", {"x": made(1)}) == running_digest("", {"x": made(1)})
    assert running_digest("", {"x": made(1)}) != running_digest("", {"x": made(2)})
