"""setup.py asks for each third-party package that libai_data imports."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
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


def required(lists: set[str]) -> set[str]:
    """Names of the distributions in these lists of setup.py, in lower case."""
    tree = ast.parse((REPOSITORY / "setup.py").read_text())
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
        for node in ast.walk(ast.parse(path.read_text())):
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
