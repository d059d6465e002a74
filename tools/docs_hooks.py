"""What MkDocs writes into pages: the table of config keys, made from the code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from libai_data.config.defaults import KEYS, SECTIONS, Key

MARK = "<!-- the table of config keys -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the table in the place of its mark."""
    return markdown.replace(MARK, config_keys())


def config_keys() -> str:
    """Markdown: a table of the keys of each section."""
    lines: list[str] = []
    for section, keys in groupby({**SECTIONS, **KEYS}.items(), key=lambda item: item[0].partition(".")[0]):
        lines += [f"## {section}", "", "| key | allowed | default | meaning |", "|---|---|---|---|"]
        lines += ["| " + " | ".join(cells(name, key)) + " |" for name, key in keys] + [""]
    return "\n".join(lines)


def cells(name: str, key: Key) -> Iterator[str]:
    """The cells of the row of a key."""
    default = "(required)" if name in REQUIRED else "(computed)" if key.is_computed else f"`{key.default!r}`"
    for text in (f"`{name}`", key.rule.allowed, default, key.meaning):
        yield text.replace("|", "\\|")


REQUIRED = ("model", "optim", "dataloader.train")
