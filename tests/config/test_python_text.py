from __future__ import annotations

import itertools

from omegaconf import DictConfig

from libai_data.config import LazyCall, LazyConfig


def test_a_config_is_shown_as_the_statements_that_make_it() -> None:
    """The example of LiBai's own tests, with a reference, a function and a key that is no name."""
    cfg = DictConfig(
        {
            "section": {"b": 2, "a": "modified"},
            "lazyobj": LazyCall(itertools.count)(
                y="base_a_1_from_b",
                x={"a": 1, "b": 2, "c": LazyCall(itertools.count)(x={"r": "a", "s": 2.4, "t": [1, 2, 3, "z"]})},
            ),
            "list": ["a", 1, "b", 3.2],
            "same": "${section.b}",
            "function": len,
            "no-name": None,
            "quotes": 'it is "so"',
            "empty": {},
        },
        flags={"allow_objects": True},
    )
    assert (
        LazyConfig.to_py(cfg)
        == """\
cfg.empty = {}
cfg.function = builtins.len
cfg.lazyobj = itertools.count(
    x={
        "a": 1,
        "b": 2,
        "c": itertools.count(x={"r": "a", "s": 2.4, "t": [1, 2, 3, "z"]}),
    },
    y="base_a_1_from_b",
)
cfg.list = ["a", 1, "b", 3.2]
cfg["no-name"] = None
cfg.quotes = 'it is "so"'
cfg.same = 2
cfg.section.a = "modified"
cfg.section.b = 2
"""
    )
    assert LazyConfig.to_py(cfg.section, prefix="") == 'a = "modified"\nb = 2\n'
