"""Each Python and shell block of the documentation is run here, or says before it why not.

A block is run as it stands:

* the Python blocks of one page make one program, run in an empty folder, in the process of the tests;
* a shell block is run by bash in an empty folder, with this environment's programs.

A comment right before the block changes that:

* `<!-- runs in: repository -->`: the shell block runs in a copy of the repository, which all blocks share;
* `<!-- tested by: tests/...py: TEXT -->`: another test does what the block does; TEXT occurs in both; and
* `<!-- not run: REASON -->`.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from libai_data.mesh.current import set_mesh
from tests.deadline import run_to_end
from tests.properties import slowly

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    *(page for name in ("README.md", "CONTRIBUTING.md") if (page := REPOSITORY / name).is_file()),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
SHELL = ("bash", "shell", "sh")
# Every block names its language, so that none escapes by having none.
LANGUAGES = ("python", *SHELL, "text", "yaml", "json", "toml", "dockerfile", "mermaid")
BLOCK = re.compile(
    r"^(?P<indent>[ ]*)```(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL
)
DIRECTIVE = re.compile(r"<!--\s*(?P<kind>runs in|tested by|not run):\s*(?P<value>(?:(?!-->).)*?)\s*-->\s*\Z", re.DOTALL)
# Starts a server that lives as long as its process.
OWN_PROCESS = ("streaming.md",)
SECONDS = 300


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: The Markdown file.
        line: Line of the first line of code, from 1.
        language: What stands behind the opening fence.
        code: The code, without the indentation of the fence.
        directive: Kind and value of the comment before the block, if there is one.
    """

    page: Path
    line: int
    language: str
    code: str
    directive: tuple[str, str] | None

    @property
    def name(self) -> str:
        page = self.page.relative_to(REPOSITORY) if REPOSITORY in self.page.parents else self.page.name
        return f"{page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a Markdown file."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in BLOCK.finditer(text):
        directive = DIRECTIVE.search(text[: match.start()])
        code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        blocks.append(
            Block(
                page=page,
                line=text[: match.start("code")].count("\n") + 1,
                language=match["language"].strip().split(" ")[0],
                code=code,
                directive=(directive["kind"], directive["value"]) if directive else None,
            )
        )
    return blocks


def environment() -> dict[str, str]:
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "PATH": os.pathsep.join(path)}


def run(command: list[str], folder: Path) -> None:
    result = run_to_end(command, SECONDS, cwd=folder, env=environment())
    assert result.returncode == 0, result.stdout + result.stderr


def run_python(blocks: list[Block], folder: Path) -> None:
    """Run the Python blocks of one page as one program, whose line numbers are those of the page."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    program = folder / f"{blocks[0].page.stem}.py"
    program.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if blocks[0].page.name in OWN_PROCESS:
        run([sys.executable, str(program)], folder)
        return
    before = Path.cwd()
    os.chdir(folder)
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        os.chdir(before)
        set_mesh(None)


def left_out(folder: str, names: list[str]) -> set[str]:
    """What a copy of the repository needs not: what setup, training and tools have made."""
    made = {".git", ".venv", "data", "output", "build", "dist", "site"} if Path(folder) == REPOSITORY else set()
    return {name for name in names if name in made or name.endswith(("cache__", "_cache", ".hypothesis"))}


def run_shell(block: Block, folder: Path) -> None:
    """Run a shell block in `folder`, or in a copy of the repository there."""
    if block.directive is not None:
        assert block.directive[1] == "repository", f"{block.name} can only run in: repository"
        folder = folder / "repository"
        if not folder.exists():
            shutil.copytree(REPOSITORY, folder, ignore=left_out)
            (folder / ".venv").symlink_to(sys.prefix)
    run(["bash", "-euo", "pipefail", "-c", block.code], folder)


def check_tested_elsewhere(block: Block) -> None:
    """Check that the test that a block names has to do with the block."""
    assert block.directive is not None
    file, _, text = block.directive[1].partition(":")
    text = text.strip()
    assert text, f"{block.name}: write <!-- tested by: tests/...py: TEXT -->, with a TEXT that block and test contain"
    assert text in block.code, f"{block.name} does not contain {text!r}"
    assert (REPOSITORY / file).is_file(), f"{block.name} names {file}, which does not exist"
    assert text in (REPOSITORY / file).read_text(encoding="utf-8"), f"{file} does not contain {text!r} of {block.name}"


def is_run(block: Block) -> bool:
    return block.directive is None or block.directive[0] == "runs in"


LONG_PYTHON = ("docs/conformance.md",)
LONG_SHELL = tuple(f"docs/{page}.md" for page in ("api/launch", "failures", "inspecting", "records", "streaming"))
"""Pages whose blocks take seconds, and do what other tests of the short run do."""

ALL = [block for page in PAGES for block in blocks_of(page)]
PYTHON_PAGES = [
    slowly(blocks) if blocks[0].name.startswith(LONG_PYTHON) else blocks
    for page in PAGES
    if (blocks := [block for block in ALL if block.page == page and block.language == "python" and is_run(block)])
]
SHELL_BLOCKS = [
    slowly(block) if block.name.startswith(LONG_SHELL) else block
    for block in ALL
    if block.language in SHELL and is_run(block)
]
TESTED_ELSEWHERE = [block for block in ALL if block.directive is not None and block.directive[0] == "tested by"]


def test_there_are_pages_and_blocks() -> None:
    assert (REPOSITORY / "README.md") in PAGES
    assert any(block.language == "python" for block in ALL)


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.name)
def test_a_block_names_its_language_and_gives_a_reason_when_it_is_not_run(block: Block) -> None:
    assert block.language in LANGUAGES, f"{block.name}: {block.language!r} is none of {', '.join(LANGUAGES)}"
    if block.directive is not None and block.directive[0] == "not run":
        assert len(block.directive[1].split()) >= 3, f"{block.name}: {block.directive[1]!r} is no reason"


@pytest.mark.parametrize("blocks", PYTHON_PAGES, ids=lambda blocks: blocks[0].name)
def test_the_python_of_a_page_runs(blocks: list[Block], tmp_path: Path) -> None:
    run_python(blocks, tmp_path)


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=lambda block: block.name)
def test_a_shell_block_runs(block: Block, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    in_repository = block.directive is not None
    run_shell(block, tmp_path_factory.getbasetemp() if in_repository else tmp_path)


@pytest.mark.parametrize("block", TESTED_ELSEWHERE, ids=lambda block: block.name)
def test_a_block_that_is_tested_elsewhere_names_the_test(block: Block) -> None:
    check_tested_elsewhere(block)


class TestTheseTests:
    """What the tests above rely on: blocks are found, and a wrong one fails."""

    def page(self, tmp_path: Path, text: str) -> list[Block]:
        (tmp_path / "page.md").write_text(text)
        return blocks_of(tmp_path / "page.md")

    def test_a_shell_block_fails_when_any_of_its_commands_does(self, tmp_path: Path) -> None:
        (block,) = self.page(tmp_path, "```bash\nfalse\ntrue\n```\n")
        with pytest.raises(AssertionError):
            run_shell(block, tmp_path)
