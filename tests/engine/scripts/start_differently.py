"""Compares two ranks that differ in one thing after the other: `start_differently.py FOLDER`.

Each rank writes `FOLDER/<rank>.json`: case -> what it was told, and the seconds that it took.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Callable
from unittest import mock

import oneflow as flow
from omegaconf import OmegaConf

from libai_data.engine import agreement
from libai_data.engine.agreement import check_same_start
from libai_data.errors import ConfigError

IS_ODD = flow.env.get_rank() == 1


def same() -> Any:
    return OmegaConf.create({"train": {"seed": 1}, "model": {"width": 2}})


def another_seed() -> Any:
    return OmegaConf.create({"train": {"seed": 2 if IS_ODD else 1}, "model": {"width": 2}})


def one_more_key() -> Any:
    return OmegaConf.create({"train": {"seed": 1}, "model": {"width": 2, **({"depth": 3} if IS_ODD else {})}})


def told(cfg: Any) -> str:
    try:
        check_same_start(cfg)
    except ConfigError as error:
        return f"ConfigError: {error}"
    return "agreed"


def main() -> None:
    cases: dict[str, Callable[[], Any]] = {
        "same": same,
        "another seed": another_seed,
        "one more key": one_more_key,
        "another version": same,
        "same again": same,
    }
    found = {}
    installed = agreement._version
    for case, make in cases.items():
        odd = {"numpy": "0.0.1"} if IS_ODD and case == "another version" else {}

        def version(name: str, odd: dict[str, str] = odd) -> str:
            return odd.get(name) or installed(name)

        with mock.patch.object(agreement, "_version", version):
            found[case] = told(make())
    Path(sys.argv[1], f"{flow.env.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
