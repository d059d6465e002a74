"""Divides an integer in given proportions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import inf
from typing import Any

import numpy as np

from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import ANYTHING, several


def shares_of(what: str, weights: Sequence[Any]) -> list[Fraction]:
    """Exact shares with the sum 1, in the proportions of weights, which `what` names in messages. A float counts as the
    decimal number that Python prints for it. A ConfigError if a weight is negative or no number, or all are 0."""
    if not several(ANYTHING).accepts(weights):
        raise ConfigError(f"{what} are {weights!r:.200}; give a list of numbers")
    exact = [_fraction(what, weight, weights) for weight in weights]
    total = sum(exact, Fraction(0))
    if not total:
        raise ConfigError(f"{what} are {list(weights)}; at least one must be above 0")
    return [weight / total for weight in exact]


def _fraction(what: str, weight: Any, weights: Sequence[Any]) -> Fraction:
    if isinstance(weight, (int, np.integer)) and not isinstance(weight, bool) and weight >= 0:
        return Fraction(int(weight))
    if isinstance(weight, (float, np.floating)) and 0 <= weight < inf:
        return Fraction(repr(float(weight)))
    raise ConfigError(f"{what} are {list(weights)}; each must be a number of at least 0, but one is {weight!r}")


def split_evenly(whole: int, shares: Sequence[Fraction]) -> list[int]:
    """Divide an integer by the method of largest remainders (Hamilton's).

    Each result differs from its share by less than 1. If remainders are equal, the first one is rounded up first.
    """
    exact = [whole * share for share in shares]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda number: (parts[number] - exact[number], number))
    for number in by_remainder[: whole - sum(parts)]:
        parts[number] += 1
    return parts
