"""`import libai_data` makes a later `import oneflow` find its CUDA libraries, wherever these lie."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from libai_data.launch import cuda_libraries
from libai_data.launch.cuda_libraries import SONAMES
from tests.deadline import run_to_end
from tests.properties import slowly

REPOSITORY = Path(__file__).resolve().parents[2]
SITE = Path(np.__file__).parents[1]
LOADED = """
import ctypes, sys
from pathlib import Path
import libai_data.launch.cuda_libraries as cuda_libraries
print("missing", cuda_libraries.load(Path(sys.argv[1])))
for line in open("/proc/self/maps"):
    if ".so" in line and line.split()[2] == "00000000":
        print(line.split()[-1])
"""


def run(code: str, *arguments: object, path: Sequence[Path] = (), **variables: str) -> str:
    """Run code in a Python that has no site-packages but the given folders; return what it printed."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    env.update(PYTHONPATH=os.pathsep.join(map(str, [REPOSITORY, *path])), **variables)
    command = [sys.executable, "-S", "-c", code, *map(str, arguments)]
    result = run_to_end(command, env=env)
    return result.stdout + result.stderr


def build_libraries(folder: Path, sonames: Sequence[str] = SONAMES) -> Path:
    """Make small shared libraries with the names of the real ones."""
    folder.mkdir(parents=True)
    first = folder / sonames[0]
    subprocess.run(["cc", "-shared", "-o", first, "-x", "c", "-"], input=b"int anything;", check=True)
    for soname in sonames[1:]:
        (folder / soname).write_bytes(first.read_bytes())
    return folder


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """OneFlow and the CUDA libraries in two folders, as with a user site or `pip install --target`."""
    root = tmp_path_factory.mktemp("apart")
    (root / "site" / "oneflow").mkdir(parents=True)
    (root / "packages").mkdir()
    for entry in SITE.iterdir():
        if entry.name not in ("oneflow", "nvidia") and not entry.name.startswith(("__editable__", "libai_data")):
            (root / "site" / entry.name).symlink_to(entry)
    for entry in (SITE / "oneflow").iterdir():
        (root / "site" / "oneflow" / entry.name).symlink_to(entry)
    (root / "packages" / "nvidia").symlink_to(SITE / "nvidia")
    return {"site": root / "site", "packages": root / "packages"}


def test_oneflow_alone_does_not_find_libraries_that_lie_elsewhere(apart: dict[str, Path]) -> None:
    # The premise of the tests below, on a machine without CUDA libraries of its own.
    output = run("import oneflow", path=[apart["site"], apart["packages"]])
    if not output.rstrip().endswith("No such file or directory"):
        pytest.skip("this machine has CUDA 11 libraries on its search path")
    assert "ImportError: lib" in output


@pytest.mark.parametrize("before", [slowly(""), "import sys; sys.path.insert(0, 'x' * 300); "])
def test_oneflow_imports_after_libai_data(before: str, apart: dict[str, Path]) -> None:
    code = f"{before}import libai_data, oneflow; print('sum', oneflow.ones(3).sum().item())"
    assert "sum 3.0" in run(code, path=[apart["site"], apart["packages"]])


def test_a_missing_library_is_named_with_what_to_install(apart: dict[str, Path]) -> None:
    output = run("import libai_data; print('imported'); import oneflow", path=[apart["site"]])
    if "imported" in output and "Error" not in output:
        pytest.skip("this machine has CUDA 11 libraries on its search path")
    assert "imported" in output
    assert "libcudnn_cnn_train.so.8" in output
    assert 'pip install nvidia-cublas-cu11 "nvidia-cudnn-cu11<9"' in output


@pytest.mark.slow
def test_every_rank_finds_the_libraries_in_a_script_that_imports_oneflow_alone(
    apart: dict[str, Path], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, oneflow as flow\nos.write(1, b'rank %d imported\\n' % flow.env.get_rank())\n")
    # The ranks' interpreter has no site-packages of its own either.
    code = f"""
import subprocess, sys
sys.executable = {str(tmp_path / "python")!r}
import libai_data.launch.launcher as launch
sys.exit(launch.main(["--nproc_per_node", "2", {str(script)!r}]))
"""
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    output = run(code, path=[apart["site"], apart["packages"]])
    assert "rank 0 imported" in output, output
    assert "rank 1 imported" in output, output


@pytest.mark.parametrize(
    ("own", "packages", "is_beside_oneflow", "loaded"),
    [
        pytest.param(0, {"all": SONAMES}, False, {"all": 6}, id="packages, if the machine has none"),
        pytest.param(6, {"cublas": SONAMES}, True, {}, id="the machine's own, if it has all"),
        pytest.param(2, {"cudnn": SONAMES[2:]}, False, {"cudnn": 4}, id="both, if they complete each other"),
        pytest.param(0, {"cublas": SONAMES[:2], "cudnn": SONAMES[2:]}, True, {}, id="none that the wheel finds itself"),
    ],
)
def test_what_oneflow_would_not_find_is_loaded_from_packages(
    own: int, packages: dict[str, Sequence[str]], is_beside_oneflow: bool, loaded: dict[str, int], tmp_path: Path
) -> None:
    for name, sonames in packages.items():
        build_libraries(tmp_path / "nvidia" / name / "lib", sonames)
    machine = build_libraries(tmp_path / "own", SONAMES[:own]) if own else tmp_path
    oneflow = tmp_path / ("oneflow" if is_beside_oneflow else "elsewhere/oneflow")
    output = run(LOADED, oneflow, path=[tmp_path], LD_LIBRARY_PATH=str(machine) if own else "")
    assert "missing []" in output
    assert [f"{machine / soname}\n" in output for soname in SONAMES] == [True] * own + [False] * (6 - own)
    assert {name: output.count(f"nvidia/{name}/lib/") for name in loaded} == loaded
    assert output.count("nvidia") == sum(loaded.values())


def test_importing_libai_data_loads_no_library_and_not_oneflow() -> None:
    code = "import sys, libai_data; print('oneflow' in sys.modules, 'cublas' in open('/proc/self/maps').read())"
    assert run(code, path=[SITE]) == "False False\n"


def test_importing_libai_data_where_oneflow_is_not_installed_works() -> None:
    assert run("import libai_data; print(libai_data.__version__)").count(".") == 2


def test_the_hook_is_installed_once() -> None:
    code = """
import sys
from contextlib import nullcontext
import libai_data
from libai_data.launch.cuda_libraries import install_import_hook
install_import_hook(nullcontext, nullcontext)
print(sum(type(finder).__name__ == "_Finder" for finder in sys.meta_path))
"""
    assert run(code) == "1\n"


def test_an_interrupt_while_the_extension_is_loaded_is_no_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise ImportError("KeyboardInterrupt: ")  # as pybind11 does

    monkeypatch.setattr(importlib.machinery.ExtensionFileLoader, "create_module", interrupted)
    monkeypatch.setattr(cuda_libraries, "load", lambda folder: [])
    spec = importlib.machinery.ModuleSpec("extension", None)
    with pytest.raises(KeyboardInterrupt):
        cuda_libraries._Loader("extension", "extension.so", nullcontext).create_module(spec)
