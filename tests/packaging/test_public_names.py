"""`from libai_data import X` works for each public name, and type checkers see the same names."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import libai_data

if TYPE_CHECKING:  # For `make types`.
    from typing_extensions import assert_type

    assert_type(libai_data.DataLoader([0]), libai_data.DataLoader)
    assert_type(libai_data.from_iterable([0], 1), libai_data.DataLoader)

REPOSITORY = Path(__file__).resolve().parents[2]
PATHS = REPOSITORY / "docs" / "api" / "paths.md"
# The names that LiBai's users know (DESIGN: "public names keep their names and signatures").
LIBAI_NAMES = [
    "Instance",
    "DistTensorData",
    "trivial_batch_collator",
    "build_nlp_train_loader",
    "build_nlp_test_loader",
    "build_nlp_train_val_test_loader",
    "build_image_train_loader",
    "build_image_test_loader",
    "CyclicSampler",
    "SingleRoundSampler",
    "DefaultTrainer",
    "TrainerBase",
    "HookBase",
    "EagerTrainer",
    "GraphTrainer",
    "default_setup",
    "LazyConfig",
    "LazyCall",
    "instantiate",
    "default_argument_parser",
    "get_nd_sbp",
    "get_layer_placement",
    "get_data_parallel_rank",
    "get_data_parallel_size",
    "synchronize",
]


def test_the_names_that_libai_users_know_are_public() -> None:
    assert set(LIBAI_NAMES) <= set(libai_data.__all__)
    assert set(LIBAI_NAMES) <= set(dir(libai_data))


@pytest.mark.parametrize("name", libai_data.__all__)
def test_a_public_name_is_the_object_of_its_module(name: str) -> None:
    module = importlib.import_module(libai_data._MODULES[name])
    assert getattr(libai_data, name) is getattr(module, name)


@pytest.mark.parametrize("package", ["libai_data", "libai_data.data.datasets", "libai_data.data.transforms"])
def test_type_checkers_see_which_names_are_public(package: str) -> None:
    """To them, `import X as X` makes a name public. They compute no `__all__`."""
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == module._MODULES
    assert module.__all__ == [*module._MODULES]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Instanze'"):
        libai_data.Instanze  # noqa: B018


def public_paths() -> set[str]:
    """The import paths that docs/api/paths.md names."""
    paths: set[str] = set()
    for path, text in re.findall(
        r"^\| `(libai_data[a-z_.]*)` \| (.*) \|$", PATHS.read_text(encoding="utf-8"), re.MULTILINE
    ):
        paths |= {path, *(path + below for below in re.findall(r"`(\.[a-z_]+)`", text))}
    return paths


@pytest.mark.parametrize("path", sorted(public_paths()))
def test_a_public_path_can_be_imported_and_says_what_is_there(path: str) -> None:
    assert importlib.import_module(path).__doc__


def test_configs_docs_and_examples_import_from_public_paths_alone() -> None:
    written = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "configs").rglob("*.py")]
    written += (REPOSITORY / "libai_data" / "engine" / "configs").rglob("*.py")
    written += [path for path in (REPOSITORY / "tools").glob("*.py") if path.name != "benchmark.py"]
    for path in written:
        for module in re.findall(
            r"^ *(?:from|import) (libai_data[a-z_.]*)", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert module in public_paths(), f"{path} imports {module}, which docs/api/paths.md does not name"


@pytest.mark.parametrize("package", ["libai_data.data.datasets", "libai_data.data.transforms"])
def test_the_reference_shows_each_name_that_is_loaded_at_first_use(package: str) -> None:
    page = (PATHS.parent / "samples.md").read_text(encoding="utf-8")
    shown = re.search(rf"^::: {re.escape(package)}\n +options:\n +members: \[(.+)\]$", page, re.MULTILINE)
    assert shown is not None and sorted(shown[1].split(", ")) == sorted(importlib.import_module(package).__all__)
