"""Properties that are computed once, without a lock that a fork could inherit while another thread holds it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):
        """As that of functools in Python 3.12. In older versions, all objects of a class share one lock.

        Two threads may compute the property at the same time, so its value must depend on the object alone.
        """

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value
