"""The page of config keys has every key, with what the code says of it."""

from __future__ import annotations

import re
from pathlib import Path

from libai_data.config import default_graph, default_train
from libai_data.config.defaults import KEYS
from tests.config.test_values import leaves

REPOSITORY = Path(__file__).resolve().parents[2]
# Their values are LazyCalls, or the trainer's.
OTHERS = {"model", "optim", "dataloader.train", "dataloader.test", "dataloader.consumed_samples", "datamodule"}


def rows() -> dict[str, list[str]]:
    """Key -> the other cells of its row on the page."""
    page = (REPOSITORY / "docs" / "api" / "config_keys.md").read_text(encoding="utf-8")
    found = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in page.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in found}


def test_the_page_has_every_key_with_what_it_may_be_its_default_and_its_meaning() -> None:
    table = rows()
    assert set(table) == {*KEYS, *OTHERS}
    for name, (allowed, default, meaning) in table.items():
        assert allowed and default and meaning, name
        if name in KEYS:
            key = KEYS[name]
            assert allowed == key.rule.allowed, name
            assert default == ("(computed)" if key.is_computed else f"`{key.default!r}`"), name


def test_every_key_of_the_default_sections_is_in_the_table() -> None:
    defaults = {*leaves(default_train(), "train"), *leaves(default_graph(), "graph")}
    assert defaults == {name for name, key in KEYS.items() if not key.is_computed and "tokenization" not in name}


def test_every_key_that_the_code_names_in_a_text_is_in_the_table() -> None:
    named = re.compile(r"[\"\'](train|graph|tokenization|dataloader|datamodule|optim|model)((?:\.[a-z_]+)+)[\"\']")
    known = {*KEYS, *OTHERS}
    known |= {name.rpartition(".")[0] for name in known} | {"train.evaluation", "train.scheduler"}
    # Keys below LazyCalls, those of a model of LiBai's, and what the trainer notes.
    below = ("scheduler", "evaluation.evaluator", "computed")
    known_below = (*(f"train.{name}." for name in below), "dataloader.train.", "dataloader.test.", "model.", "optim.")
    unknown = {
        f"{path.name}: {''.join(match)}"
        for folder in ("config", "engine", "commands", "mesh", "launch")
        for path in (REPOSITORY / "libai_data" / folder).rglob("*.py")
        for match in named.findall(path.read_text(encoding="utf-8"))
        if "".join(match) not in known and not "".join(match).startswith(known_below)
    }
    assert unknown == set()
