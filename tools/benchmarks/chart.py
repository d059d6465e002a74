"""A suite's results as a table of a page, and the peers' as a plot: `python -m tools.benchmarks.chart RESULT PAGE`."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

NAMES = {
    "libai_data": ("libai_data", "libai_data"),
    "spdl": ("SPDL", "spdl"),
    "torch": ("PyTorch `DataLoader`", "torch"),
    "torchdata": ("`StatefulDataLoader`", "torchdata"),
    "dali": ("DALI, CPU", "nvidia-dali-cuda120"),
    "oneflow": ("OneFlow `DataLoader`", "oneflow"),
    "grain": ("Grain", "grain"),
    "streaming": ("MosaicML Streaming", "mosaicml-streaming"),
}
"""Contender -> how a reader calls it, and its package."""

LIMITS = {"raw": "raw copies", "gather": "vectorised gather", "libjpeg-turbo": "libjpeg-turbo alone"}
_OURS = "libai_data"


def claims(result: Mapping[str, Any]) -> str:
    """One line a claim: what was measured, its spread, and what is demanded."""
    lines = [["work", "workers", "measured", "median", "over the rounds", "aim"], ["---"] * 6]
    for row in result["rows"]:
        for claim in row["claims"]:
            shown = claim["shown"] or [claim["reason"], ""]
            lines.append([row["work"], row["workers"], claim["subject"], *shown, claim["demand"]])
    return _markdown(lines)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(result: Mapping[str, Any]) -> str:
    """One line a loader, one column a row of the suite: milliseconds a batch, processor time, and how often slower."""
    rows = result["rows"]
    versions = {**result["peers_versions"], **result["versions"]}
    lines = [["loader", "version", *(row["name"] for row in rows)]]
    for name, (shown, package) in NAMES.items():
        lines.append([shown, versions.get(package, ""), *(_cell(row, name) for row in rows)])
    limits = [next((name for name in LIMITS if name in {**row["values"], **row["missing"]}), "") for row in rows]
    lines.append(["*limit*", "", *(_cell(row, name) + f", {LIMITS.get(name)}" for row, name in zip(rows, limits))])
    lines.insert(1, ["---"] * len(lines[0]))
    return _markdown(lines)


def _cell(row: Mapping[str, Any], name: str) -> str:
    if name not in row["values"]:
        return str(row["missing"].get(name, "")).partition(":")[0]
    seconds, ours = row["values"][name], row["values"].get(_OURS, [])
    cell = f"{1e3 * median(seconds):.3g} ms"
    if name in row["processor"]:
        cell += f" ({1e3 * median(row['processor'][name]):.3g})"
    if name != _OURS and ours:
        cell += f", {median(theirs / own for theirs, own in zip(seconds, ours)):.2g} x"
    return cell


def described(result: Mapping[str, Any]) -> str:
    """How it was measured, in a sentence or two."""
    machine, versions = result["machine"], result["versions"]
    others = [share for row in result["rows"] for share in row["others"]]
    python = f"Python {versions['python']}"
    if result["suite"] == "peers":
        python += f", the peers' {result['peers_versions']['python']}"
    share = f"Other programs used {100 * median(others):.0f} % of the cores." if others else ""
    quick = " **A quick run: the numbers mean little.**" if result["quick"] else ""
    return (
        f"Measured on {result['finished'][:10]}, {result['rounds']} round(s), {machine['cores']} cores "
        f"({machine['processor']}), {python}. {share}{quick}"
    )


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw a batch's time of each loader, one panel a row of the suite."""
    pyplot = drawing()
    rows = result["rows"]
    figure, panels = pyplot.subplots(1, len(rows), figsize=(3.2 * len(rows), 3.2), squeeze=False, sharey=True)
    for panel, row in zip(panels[0], rows):
        names = [name for name in NAMES if any(name in each["values"] for each in rows)][::-1]
        values = [1e3 * median(row["values"][name]) if name in row["values"] else 0.0 for name in names]
        colours = ["#c0392b" if name == _OURS else "#7f8c8d" for name in names]
        bars = panel.barh([NAMES[name][0].replace("`", "") for name in names], values, color=colours)
        panel.bar_label(bars, [f"{value:.3g}" if value else "" for value in values], padding=2, fontsize=8)
        panel.set(title=row["name"], xlabel="ms a batch of 32", xlim=(0, 1.2 * max([*values, 1e-9])))
        panel.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def drawing() -> Any:
    """matplotlib's pyplot, without a screen, for files that are the same in each run."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "libai_data", "svg.fonttype": "none"})
    return importlib.import_module("matplotlib.pyplot")


def save(figure: Any, path: Path) -> None:
    """Write a figure of `drawing` to a file."""
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def write_into(page: Path, suite: str, content: str) -> None:
    """Replace what is between the suite's marks in a page.

    Raises:
        ValueError: The page has no such marks.
    """
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- chart: {suite} -->", "<!-- end of chart -->"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{page} has no line {begin!r} with a line {end!r} after it")
    page.write_text(f"{before}{begin}\n{content}\n{end}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Replace the table of a suite in a page, and draw the plot of the peers beside the page."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("result", type=Path, help="what `python tools/benchmark.py SUITE --json` wrote")
    arguments.add_argument("page", type=Path, help="Markdown file with the marks of the table")
    asked = arguments.parse_args(argv)
    result = json.loads(asked.result.read_text(encoding="utf-8"))
    suite = result["suite"]
    content = table(result) if suite == "peers" else claims(result)
    write_into(asked.page, suite, f"{described(result)}\n\n{content}")
    if suite == "peers":
        plot(result, asked.page.with_name("peers.svg"))


if __name__ == "__main__":
    main()
