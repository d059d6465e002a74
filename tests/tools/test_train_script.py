"""tools/train.sh: LiBai's arguments and variables, handed to the launcher; and the make targets that use it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deadline import run_to_end

REPOSITORY = Path(__file__).resolve().parents[2]
# LiBai's variables, which a job around the tests may have set.
VARIABLES = ("NODE", "NODE_RANK", "ADDR", "PORT", "MAKEFLAGS", "MAKELEVEL")


@pytest.fixture()
def checkout(tmp_path: Path) -> Path:
    """A checkout whose Python prints its arguments, one per line."""
    (tmp_path / "tools").mkdir()
    shutil.copy(REPOSITORY / "tools" / "train.sh", tmp_path / "tools")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\nprintf "%s\\n" "PYTHONPATH=$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    return tmp_path


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    env.update(variables)
    return run_to_end([*map(str, command)], env=env)


def arguments(checkout: Path, *script_arguments: str, **variables: str) -> list[str]:
    result = run("bash", checkout / "tools" / "train.sh", *script_arguments, **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[1:]


def test_the_variables_of_libai_describe_the_machines_and_the_port_which_one_machine_chooses(checkout: Path) -> None:
    launch, script = "-m libai_data.launch --nnodes 1 --node_rank 0 --nproc_per_node 4 --master_addr 127.0.0.1", "f.py"
    expected = [*launch.split(), script, "--config-file", "c.py", "train.a=1", "b=[x, y]"]
    assert arguments(checkout, "f.py", "c.py", "4", "train.a=1", "b=[x, y]") == expected
    assert "--master_port 4321" in " ".join(arguments(checkout, "f.py", "c.py", "1", PORT="4321"))
    line = " ".join(arguments(checkout, "f.py", "c.py", "8", NODE="2", NODE_RANK="1", ADDR="10.0.0.1"))
    assert "--nnodes 2 --node_rank 1 --nproc_per_node 8 --master_addr 10.0.0.1 --master_port 12345 f.py" in line
    # The launcher names the mistake: bash would only say that a variable is not set.
    assert arguments(checkout, "f.py", "c.py", "1", NODE="node1")[2:4] == ["--nnodes", "node1"]


def test_the_package_is_found_from_every_folder(checkout: Path) -> None:
    script = checkout / "tools" / "train.sh"
    result = run("bash", script, "f.py", "c.py", "1", PYTHONPATH="/mine")
    assert result.stdout.splitlines()[0] == f"PYTHONPATH={checkout}:/mine"


def test_too_few_arguments_are_answered_with_the_usage() -> None:
    result = run("bash", REPOSITORY / "tools" / "train.sh", "f.py")
    assert result.returncode == 2
    assert "FILE CONFIG GPUS" in result.stderr


def commands_of(target: str) -> list[str]:
    lines = run("make", "--dry-run", "--directory", REPOSITORY, target).stdout.splitlines()
    return [line for line in lines if not line.startswith("make")]


def test_make_train_sets_up_writes_the_digits_and_trains_on_four_ranks() -> None:
    assert commands_of("train") == [
        "bash tools/setup.sh examples",
        ".venv/bin/python tools/prepare_digits.py",
        "bash tools/train.sh tools/train_net.py configs/vit_digits.py 4 train.dist.tensor_parallel_size=2",
    ]


def test_make_train_gpt_writes_the_corpus_tokenizes_it_and_trains_on_four_ranks() -> None:
    commands = commands_of("train-gpt")
    assert commands[0] == "bash tools/setup.sh test"
    names = ("tools/prepare_stdlib.py", "-m libai_data train-tokenizer", "-m libai_data preprocess", "tools/unigram.py")
    assert [name for line in commands for name in names if name in line] == list(names)
    assert commands[-1] == (
        "bash tools/train.sh tools/train_net.py configs/gpt_stdlib.py 4 train.dist.tensor_parallel_size=2"
    )


def test_make_test_all_sets_up_and_runs_the_short_run_and_then_what_it_left_out() -> None:
    setup, short, rest = commands_of("test-all")
    assert setup == "bash tools/setup.sh test"
    assert short == ".venv/bin/python -m pytest -n 6"
    # Short runs leave out what is slow, and try few examples of what Hypothesis marks.
    assert rest == '.venv/bin/python -m pytest -n 8 -m "slow or hypothesis" --hypothesis-profile long'


def test_make_help_lists_the_targets() -> None:
    listed = run("make", "--directory", REPOSITORY, "help").stdout
    for target in ("train", "test", "lint", "types", "docs", "clean"):
        assert f"make {target} " in listed
