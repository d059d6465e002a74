"""How much a test tries: little in `make test`, much in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

slowly = partial(pytest.param, marks=pytest.mark.slow)
"""Parameters of a test that only the long run tries."""


def few_of(values: Iterable[Any], *short: Any) -> list[Any]:
    """All values as parameters, of which the short run tries only those of `short`."""
    values = list(values)
    assert set(short) < set(values)
    return [value if value in short else slowly(value) for value in values]


MANY = 100
"""Examples of a property without a number of its own in the long run; the profile says how many."""


def is_long_run() -> bool:
    """Whether the profile is "long", as in `make test-rest`."""
    return (settings.default or settings()).max_examples >= MANY


def examples(many: int) -> int:
    """Examples to try: `many` with the profile "long", and in proportion fewer with another."""
    return max(3, many * (settings.default or settings()).max_examples // MANY)


def in_one_folder(many: int) -> settings:
    """Settings of a property whose examples share a temporary folder."""
    return settings(max_examples=examples(many), suppress_health_check=[HealthCheck.function_scoped_fixture])
