"""Progress bars, generators and iterators of Python around a loader, or around what a loader is made of."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import pytest
from tqdm import tqdm

from libai_data.errors import ConfigError, SampleError
from libai_data.iterables import from_iterable
from libai_data.structures import batch_info
from tests.iterables.rows import rows_of, sample


def each_of(loader: Any) -> Iterator[Any]:
    yield from loader


def each_itself(batch: Any) -> Any:
    return batch


class Bar:
    """Keeps what it goes through as `alive_progress.alive_it` does."""

    __module__ = "alive_progress.core.progress"

    def __init__(self, it: Any) -> None:
        self._it = it

    def __iter__(self) -> Iterator[Any]:
        return iter(self._it)


WRAPPERS: dict[str, Any] = {
    "rich": lambda loader: pytest.importorskip("rich.progress").track(loader, disable=True),
    "generator": each_of,
    "generator expression": lambda loader: (batch for batch in loader),
    "islice": lambda loader: islice(loader, 3),
    "map of chain": lambda loader: map(each_itself, chain(loader)),
    "enumerate": enumerate,
    "alive_progress": Bar,
    "zip": lambda loader: zip(range(3), loader),
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_what_goes_through_a_loader_must_say_whether_it_yields_batches(wrapper: Any) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    rows: Any = [sample(row) for row in range(8)]
    loader = torch_data.DataLoader(rows, batch_size=4)
    message = r"goes through a \w+, which yields batches, .* set batches=True, or batches=False"
    for within in (loader, iter(loader), tqdm(loader, disable=True), from_iterable(rows, 4)):
        with pytest.raises(ConfigError, match=message):
            from_iterable(wrapper(within), 2)
        with pytest.raises(SampleError, match=message):
            next(iter(from_iterable(partial(wrapper, within), 2)))
    assert from_iterable(wrapper(loader), 2, batches=True) is not None
    assert from_iterable(wrapper(rows), 2) is not None


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_a_progress_bar_around_a_loader_changes_neither_batches_nor_state(wrapper: Any) -> None:
    bare, shown = (from_iterable([sample(number) for number in range(16)], 4) for _ in range(2))
    expected = [(batch_info(batch), rows_of(batch)) for batch in islice(bare, 2)]
    found = []
    for item in wrapper(shown):
        batch = item[1] if isinstance(item, tuple) else item
        found.append((batch_info(batch), rows_of(batch)))
        if len(found) == 2:
            break
    assert found == expected
    assert shown.state_dict() == bare.state_dict()


def test_a_zip_that_begins_with_the_numbers_uses_no_batch_more_than_it_yields() -> None:
    bare, counted = (from_iterable([sample(number) for number in range(16)], 4) for _ in range(2))
    assert [rows_of(batch) for _, batch in zip(range(2), counted)] == [rows_of(batch) for batch in islice(bare, 2)]
    assert counted.state_dict() == bare.state_dict()
