"""What the package imports: downward in the table of docs/architecture.md, and only what setup.py asks for."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.deadline import run_to_end

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "libai_data"
ROOT = ("__init__.py", "__main__.py", "py.typed")
# Modules whose distribution is called otherwise.
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "PIL": "pillow",
    "hydra": "hydra-core",
    "sklearn": "scikit-learn",
    "cv2": "opencv-python-headless",
}
# Modules that come with a distribution that is asked for.
CONTAINED = {"antlr4": "hydra-core", "aiohttp": "s3fs"}


def rows() -> list[str]:
    """The names in the table, from the top."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## Folders", 1)[1].split("\n## ", 1)[0]
    return [
        name.rstrip("/").removesuffix(".py") for name in re.findall(r"^\| `([a-z_.]+/?)` \|", section, re.MULTILINE)
    ]


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Those directly within a node: an import is never within an expression."""
    return (child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.ExceptHandler)))


def imports(node: ast.AST, only_at_start: bool) -> Iterator[tuple[str, str]]:
    """The module and the name in it, or no name, of each import of this package."""
    for child in statements(node):
        if only_at_start and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "libai_data":
            yield from ((child.module or "", alias.name) for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from ((alias.name, "") for alias in child.names if alias.name.split(".")[0] == "libai_data")
        yield from imports(child, only_at_start)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path, known: dict[str, Path], only_at_start: bool = False) -> set[str]:
    found = imports(parsed(path), only_at_start)
    return {f"{module}.{name}" if f"{module}.{name}" in known else module for module, name in found}


def test_the_table_names_what_lies_in_the_package() -> None:
    names = rows()
    assert len(names) == len(set(names)) <= 14
    # Python leaves caches in folders that other versions had.
    there = {path.name for path in PACKAGE.iterdir() if path.is_file() or any(path.rglob("*.py"))}
    assert there == {*ROOT, *(f"{name}.py" if (PACKAGE / f"{name}.py").exists() else name for name in names)}


def test_imports_point_down_the_table() -> None:
    height = {name: -number for number, name in enumerate(rows())}
    known = modules()
    upward = [
        f"{module} imports {other}"
        for module, path in known.items()
        for other in imported(path, known)
        if module not in ("libai_data", "libai_data.__main__") and "." in other
        if height[other.split(".")[1]] > height[module.split(".")[1]]
    ]
    assert not upward


def test_no_module_imports_itself_through_others() -> None:
    known = modules()
    wanted = {module: imported(path, known, only_at_start=True) - {module} for module, path in known.items()}
    done: set[str] = set()

    def follow(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"imports in a circle: {' -> '.join([*way[way.index(module) :], module])}"
        if module not in done:
            for other in wanted.get(module, ()):
                follow(other, (*way, module))
            done.add(module)

    for module in known:
        follow(module, ())


@pytest.mark.parametrize("folder", ["loader", "delivery", "iterables"])
def test_what_reads_data_is_imported_without_oneflow(folder: str) -> None:
    known = modules()
    for module, path in known.items():
        if module.startswith(f"libai_data.{folder}"):
            names = {alias.name for node in parsed(path).body if isinstance(node, ast.Import) for alias in node.names}
            assert "oneflow" not in names, module


@pytest.mark.parametrize(
    "imported, unwanted",
    [
        ("libai_data.data.samplers, libai_data.loader.batch_loader", {"omegaconf"}),
        ("libai_data.mesh.current", {"oneflow"}),
        ("libai_data.config", {"oneflow", "hydra"}),
        # A worker imports what its dataset's module does.
        ("libai_data.engine.default_trainer", {"oneflow"}),
        (
            "libai_data.loader.worker",
            {"omegaconf", "oneflow", "tarfile", "libai_data.mesh.peers.watchdog", "libai_data.data.samplers"},
        ),
    ],
)
def test_who_reads_starts_without_what_only_a_training_needs(imported: str, unwanted: set[str]) -> None:
    """It takes longer to import than the loaders themselves, and each process that reads would wait for it."""
    code = f"import sys, {imported}; print({{*sys.modules}} & {unwanted})"
    result = run_to_end([sys.executable, "-c", code])
    assert result.stdout == "set()\n", result.stderr


def required(lists: set[str]) -> set[str]:
    """Names of the distributions in these lists of setup.py, in lower case."""
    tree = parsed(REPOSITORY / "setup.py")
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in lists:
            constants = (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))
            names.update(re.split(r"[<>=!\[ ;]", str(value))[0].lower() for value in constants)
    return names


def third_party_imports() -> dict[str, str]:
    """Top-level names of the modules that the package imports, with a file that does."""
    found: dict[str, str] = {}
    for path in (REPOSITORY / "libai_data").rglob("*.py"):
        for node in ast.walk(parsed(path)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.append(node.module)
            for module in modules:
                found.setdefault(module.split(".")[0], str(path.relative_to(REPOSITORY)))
    return found


@pytest.mark.skipif(sys.version_info < (3, 10), reason="sys.stdlib_module_names came with Python 3.10")
def test_every_package_that_is_imported_is_asked_for() -> None:
    known = required(
        {"INSTALL_REQUIRES", "EXAMPLES", "TEXT", "IMAGES", "RECORDS", "REMOTE", "CLUSTER", "INTEGRATIONS", "LIBAI"}
    )
    assert {"oneflow", "numpy", "scikit-learn"} <= known
    # tools/setup.sh installs LiBai and flowvision.
    ours = {"libai_data", "libai", "flowvision", *getattr(sys, "stdlib_module_names", ())}
    missing = {
        module: path
        for module, path in third_party_imports().items()
        if module not in ours and DISTRIBUTIONS.get(module, CONTAINED.get(module, module)).lower() not in known
    }
    assert not missing, f"imported, but not asked for in setup.py: {missing}"
