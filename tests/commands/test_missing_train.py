"""Each command says what a config without a `train` section, or with a wrong one, lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

from libai_data.commands import inspect, plan, profile, train
from libai_data.errors import ConfigError

CONFIG = """
from tests.engine.tiny import tiny_config
_cfg = tiny_config("output")
train, graph, model, optim, dataloader = (_cfg[name] for name in ("train", "graph", "model", "optim", "dataloader"))
"""
CHANGES = {
    "del train": "the config has no 'train' section; it begins with train = ",
    "train = None": "the config has no 'train' section; it begins with train = ",
    "train = 3": "the config has no 'train' section; it begins with train = ",
    "train.dist = None": "train.dist must be a section with the keys data_parallel_size",
    "train.dist = 2": "train.dist must be a section with the keys data_parallel_size",
}


@pytest.fixture(params=CHANGES)
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(f"{CONFIG}{request.param}\n")
    return str(tmp_path / "config.py"), CHANGES[request.param]


@pytest.mark.parametrize("option", [[], ["--fast-dev-run"], ["--eval-only"]], ids=str)
def test_a_training_says_what_its_config_lacks(config: tuple[str, str], option: list[str]) -> None:
    path, lacks = config
    with pytest.raises(ConfigError, match=lacks):
        train.main([path, *option])


@pytest.mark.parametrize("command", [inspect.main, plan.main, profile.main], ids=lambda main: main.__module__[20:])
def test_commands_that_look_at_a_config_say_what_it_lacks(
    config: tuple[str, str], command: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path, lacks = config
    assert command([path]) == 1
    assert lacks in capsys.readouterr().err
