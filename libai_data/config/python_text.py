"""A config as Python-like text, for people to read: `LazyConfig.to_py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from libai_data.config.naming import describe, dotted_name
from libai_data.config.signatures import TARGET

_WIDTH = 88


def to_py(cfg: Any, prefix: str = "cfg.") -> str:
    """The statements that would make a config, sorted by key; see `LazyConfig.to_py`."""
    return "".join(f"{line}\n" for line in _statements(OmegaConf.to_container(cfg, resolve=True), prefix))


def _statements(section: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    for key in sorted(section, key=str):
        name = f"{prefix}{key}" if str(key).isidentifier() else f"{prefix.rstrip('.')}[{_flat(key)}]"
        value = section[key]
        if isinstance(value, Mapping) and value and TARGET not in value:
            yield from _statements(value, f"{name}.")
        else:
            yield f"{name} = {_expression(value, 0, len(name) + 3)}"


def _expression(value: Any, indent: int, used: int) -> str:
    """The text of a value: one line, or one for each argument or element if `indent + used` leave no room."""
    flat = _flat(value)
    opening, items, closing = _parts(value)
    if not items or indent + used + len(flat) <= _WIDTH:
        return flat
    blank = " " * indent
    lines = [f"{blank}    {head}{_expression(item, indent + 4, len(head) + 1)},\n" for head, item in items]
    return f"{opening}\n{''.join(lines)}{blank}{closing}"


def _flat(value: Any) -> str:
    opening, items, closing = _parts(value)
    return opening + ", ".join(f"{head}{_flat(item)}" for head, item in items) + closing


def _parts(value: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """What a value begins with, its items with what stands before each, and what it ends with."""
    if isinstance(value, Mapping) and TARGET in value:
        arguments = [(f"{key}=", value[key]) for key in sorted(value, key=str) if key != TARGET]
        return f"{describe(value[TARGET])}(", arguments, ")"
    if isinstance(value, Mapping):
        return "{", [(f"{_flat(key)}: ", value[key]) for key in sorted(value, key=str)], "}"
    if isinstance(value, list):
        return "[", [("", item) for item in value], "]"
    if isinstance(value, str):
        text = repr(value)
        return (text if '"' in text else f'"{text[1:-1]}"'), [], ""
    return dotted_name(value) or repr(value), [], ""
