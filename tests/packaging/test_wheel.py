"""The wheel works when it is installed elsewhere: all modules, `py.typed`, and the console commands."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import libai_data
from tests.deadline import run_to_end

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel was installed into."""
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    shutil.copytree(REPOSITORY / "libai_data", source / "libai_data", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    # No download: the build's own requirements are in this environment (extra "test").
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(root), str(source))
    (wheel,) = root.glob("*.whl")
    target = ("--target", str(root / "installed"))
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", *target, str(wheel))
    return root / "installed"


def run(*command: str, **variables: str) -> str:
    env: dict[str, str] = {**os.environ, **variables}
    result = run_to_end(command, 120, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def in_installed(installed: Path, code: str) -> str:
    """Run code in another folder than the repository, with the installed package first."""
    script = installed.parent / "script.py"
    script.write_text(code)
    return run(sys.executable, str(script), PYTHONPATH=str(installed))


def test_the_wheel_holds_every_module_and_the_type_marker(installed: Path) -> None:
    def files(root: Path) -> set[str]:
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.suffix in (".py", ".typed")}

    assert files(installed / "libai_data") == files(REPOSITORY / "libai_data")
    assert "py.typed" in files(installed / "libai_data")


def test_the_wheel_is_used_from_elsewhere(installed: Path) -> None:
    printed = in_installed(
        installed,
        """
import json
import numpy as np
import libai_data
from libai_data import CyclicSampler, DistTensorData, Instance, ParallelMesh

batch = Instance.stack([Instance(images=DistTensorData(np.full((2, 2), float(i)))) for i in range(3)])
mesh = ParallelMesh(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=1, rank=3)
print(json.dumps([libai_data.__file__, libai_data.__version__, list(batch.images.tensor.shape), mesh.world_size]))
""",
    )
    file, version, shape, world_size = json.loads(printed)
    assert Path(file) == installed / "libai_data" / "__init__.py"
    assert (version, shape, world_size) == (libai_data.__version__, [3, 2, 2], 4)


def test_the_configs_of_the_wheel_are_not_those_of_a_folder_configs(installed: Path) -> None:
    folder = installed.parent / "configs" / "common"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text("train = dict(output_dir='mine')\n")
    printed = in_installed(
        installed,
        "from libai_data.config import get_config, LazyConfig\n"
        f"print(get_config('common/train.py').train.output_dir, LazyConfig.load({str(folder / 'train.py')!r}).train)\n",
    )
    assert printed == "./output {'output_dir': 'mine'}\n"


def test_the_console_command_runs(installed: Path, tmp_path: Path) -> None:
    command, script = installed / "bin" / "libai-data", tmp_path / "script.py"
    script.write_text("print('hello')")
    assert run(str(command), "launch", str(script), PYTHONPATH=str(installed)) == "hello\n"


def test_the_metadata_admit_only_what_oneflow_runs_on(installed: Path) -> None:
    (metadata,) = installed.glob("libai_data-*.dist-info/METADATA")
    text = metadata.read_text()
    assert "Requires-Python: >=3.9,<3.11" in text
    for requirement in ("oneflow", "numpy<2", "protobuf<4", "nvidia-cudnn-cu11<9", "nvidia-cublas-cu11"):
        assert f"Requires-Dist: {requirement}" in text
