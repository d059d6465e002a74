"""Write the sources of Python's standard library as JSON lines: `python tools/prepare_stdlib.py data/stdlib`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from libai_data.atomic_files import output_path
from libai_data.errors import ConfigError

PARTS = ("train", "test")
_TEST_EVERY = 32
_LEFT_OUT = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")


def write_stdlib_corpus(folder: Path, stdlib: Path | None = None) -> dict[str, int]:
    """Write `<folder>/train.jsonl` and `<folder>/test.jsonl`, a line {"text", "path"} for each source file.

    The library's own tests are left out, and files that are not UTF-8. About one file in 32 is held out for testing,
    chosen by a hash of its path. The same library gives the same files, byte for byte.

    Args:
        folder: made if it is not there.
        stdlib: the library's folder; by default that of this Python.

    Returns:
        Documents in each part.

    Raises:
        ConfigError: A part would have no document.
    """
    root = stdlib or Path(sysconfig.get_paths()["stdlib"])
    lines: dict[str, list[str]] = {part: [] for part in PARTS}
    for path, text in _sources(root):
        part = "test" if zlib.crc32(path.encode()) % _TEST_EVERY == 0 else "train"
        lines[part].append(json.dumps({"text": text, "path": path}))
    counts = {part: len(lines[part]) for part in PARTS}
    if not all(counts.values()):
        raise ConfigError(f"{root} has too few Python files for a corpus: {counts}")
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        unfinished = folder / f"{part}.jsonl.{os.getpid()}.unfinished"
        unfinished.write_text("\n".join(lines[part]) + "\n", encoding="utf-8")
        os.replace(unfinished, folder / f"{part}.jsonl")
    return counts


def _sources(root: Path) -> Iterator[tuple[str, str]]:
    """Path below the root, and text, of each source file, in the order of the paths."""
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        below = path.relative_to(root)
        if any(part in _LEFT_OUT for part in below.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield below.as_posix(), text


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: write the corpus into a folder."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "folder", type=output_path, nargs="?", default="data/stdlib", help="folder (default: %(default)s)"
    )
    folder = arguments.parse_args(argv).folder
    counts = write_stdlib_corpus(folder)
    print(", ".join(f"{count} files in {folder / part}.jsonl" for part, count in counts.items()))


if __name__ == "__main__":
    main()
