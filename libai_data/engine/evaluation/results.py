"""Results of evaluations, for logs and writers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)


def flatten_results_dict(results: Mapping[str, Any]) -> dict[str, Any]:
    """Make {"task/metric": value} of {"task": {"metric": value}}, at any depth."""
    flat: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}/{inner}": number for inner, number in flatten_results_dict(value).items()})
        else:
            flat[name] = value
    return flat


def print_csv_format(results: Mapping[str, Any], name: str = "test") -> None:
    """Log results, metric -> number or dicts of these, in two lines that can be pasted into a table."""
    flat = flatten_results_dict(results)
    logger.info("Results on %s: %s", name, ",".join(flat))
    logger.info("Results on %s: %s", name, ",".join(f"{value:.4f}" for value in flat.values()))
