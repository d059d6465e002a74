"""How many examples a property test tries: few in `make test`, many in `make test-all`."""

from __future__ import annotations

from hypothesis import settings

MANY = 100
"""Examples of a property without a number of its own in the long run; the profile says how many."""


def examples(many: int) -> int:
    """Examples to try: `many` with the profile "long", and in proportion fewer with another."""
    return max(3, many * (settings.default or settings()).max_examples // MANY)
