"""The console command `libai-data`."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from libai_data.commands import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_leads_to_a_function_and_explains_itself(name: str) -> None:
    assert callable(importlib.import_module(COMMANDS[name].module).main)
    shown = subprocess.run(
        [sys.executable, "-m", "libai_data", name, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stdout.startswith("usage: ")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name}" in shown and command.summary in shown


def test_a_mistyped_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    shown = capsys.readouterr().err
    assert "there is no command 'trian'. Did you mean 'train'?" in shown


def test_no_command_is_an_error_that_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "which command?" in capsys.readouterr().err


def test_the_command_gets_the_arguments_after_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["digits", str(tmp_path / "digits")]) == 0
    assert "Wrote the digits" in capsys.readouterr().out
    assert len(list((tmp_path / "digits").rglob("*.png"))) == 1797
