"""`libai-data state` says what a checkpoint continues with, checks it, changes it, and knows every sample's steps."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.commands.state import main
from libai_data.config import LazyCall, LazyConfig
from libai_data.data.samplers import CyclicSampler, Order
from libai_data.engine.checkpoint.directory import verify
from tests.engine.data_runs import config_of, train

CONFIG = """
from tests.engine.data_runs import config_of

_cfg = config_of("unused", length=160)
train, graph, model, optim, dataloader = (_cfg[name] for name in ("train", "graph", "model", "optim", "dataloader"))
"""
CHECKPOINT = "model_0000005"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 160 samples that was stopped after 6 steps of 8."""
    folder = tmp_path_factory.mktemp("run")
    train(config_of(folder, length=160), stop_after=5)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    return copy


def said(capsys: Any, *arguments: object, code: int = 0) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == code
    shown = capsys.readouterr()
    return str(shown.out if code == 0 else shown.err)


def indices_of_step(step: int, skipped: int = 0, seed: int = 1234) -> list[int]:
    found: list[int] = Order(160, seed).locate(8 * (step + skipped) + np.arange(8))[1].tolist()
    return found


@pytest.mark.parametrize("path", ["", CHECKPOINT])
def test_show_says_in_plain_words_what_comes(folder: Path, path: str, capsys: Any) -> None:
    shown = said(capsys, "show", folder / path)
    for words in (
        "written after 6 steps on a mesh of data 1 x tensor 1 x pipeline 1",
        "A resume continues with step 6, which uses 8 samples from position 48 on",
        "Used so far: 48 samples, on all ranks together. Epoch 0 is at 48 of 160 samples (30.0%); "
        "the next epoch begins after 112 more",
        "Dataset: TinyDataset, 160 samples, shuffled in each epoch with seed 1234",
        f"Next samples: {', '.join(map(str, indices_of_step(6)))}",
    ):
        assert words in shown
    size = re.search(r"has (\d+) bytes", shown)
    assert size is not None
    assert int(size.group(1)) < 1024


def test_verify_finds_a_changed_file(folder: Path, capsys: Any) -> None:
    assert "are as they were written" in said(capsys, "verify", folder)
    weights = folder / CHECKPOINT / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "the contents of model.safetensors have changed" in said(capsys, "verify", folder, code=1)
    assert "there is no checkpoint" in said(capsys, "verify", folder / "nothing", code=1)


def test_verify_checks_against_a_config(folder: Path, tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "config_for_state.py"
    config.write_text(CONFIG)

    def checked(*opts: str, code: int = 0) -> str:
        return said(capsys, "verify", folder, "--config-file", config, *opts, code=code)

    assert "would continue from it without a difference" in checked()
    assert "seed was 1234 and is now 7" in checked("train.seed=7", code=1)
    assert "global_batch_size was 8 and is now 16" in checked("train.global_batch_size=16", code=1)
    assert "samples was 160 and is now 80" in checked("dataloader.train.dataset.length=80", code=1)
    allowed = checked("train.global_batch_size=16", "train.resume_override=[global_batch_size]")
    assert "with these differences:" in allowed
    assert "no sample is repeated and none left out" in allowed
    assert "leaves out 16 samples more" in checked("train.skip_steps=[[7,8]]")
    # A mesh of 4 ranks, with accumulation, is the same stream.
    assert "without a difference" in checked(
        "train.dist.data_parallel_size=4", "train.train_micro_batch_size=1", "train.num_accumulation_steps=2"
    )


def test_an_edited_position_is_where_the_run_goes_on_and_the_backup_is_whole(folder: Path, capsys: Any) -> None:
    before = said(capsys, "show", folder)
    shown = said(capsys, "edit", folder, "--position", "80")
    backup = folder / f"{CHECKPOINT}.before_edit_1"
    assert str(backup) in shown
    assert "continues with step 6, which uses 8 samples from position 80 on" in shown
    assert said(capsys, "show", backup) == before.replace(CHECKPOINT, backup.name)
    verify(folder / CHECKPOINT)
    verify(backup)
    resumed = train(config_of(folder, length=160), resume=True)
    assert resumed.start_iter == 6
    assert resumed.steps[6] == indices_of_step(10)
    assert "begins with step 6" in said(capsys, "samples", folder / CHECKPOINT, "--step", "5", code=1)
    said(capsys, "edit", folder / CHECKPOINT, "--position", "8")
    assert (folder / f"{CHECKPOINT}.before_edit_2").is_dir()


def test_an_edited_seed_goes_on_with_the_config_that_says_the_same(folder: Path, capsys: Any) -> None:
    assert "train.seed=7" in said(capsys, "edit", folder, "--seed", "7")
    assert train(config_of(folder, length=160, seed=7), resume=True).steps[6] == indices_of_step(6, seed=7)


def test_edited_skips_are_left_out_and_can_be_forgotten(folder: Path, capsys: Any) -> None:
    assert "16 samples, at places 56 to 71" in said(capsys, "edit", folder, "--skip", "7", "8")
    resumed = train(config_of(folder, length=160), resume=True, stop_after=9)
    assert [resumed.steps[step] for step in (6, 7, 8)] == [indices_of_step(6), *map(indices_of_step, (9, 10))]
    last = folder / "model_0000009"
    assert "16 of them before the current place, 0 after it" in said(capsys, "show", last)
    assert "these samples belong to step 12 and later" in said(capsys, "show", last)
    assert "these samples belong to steps 10 to 10" in said(capsys, "samples", last, "--step", "8")
    assert "the next sample belongs to step 12" in said(capsys, "edit", last, "--skip", "7", "8", code=1)
    assert "Left out" not in said(capsys, "edit", folder / CHECKPOINT, "--forget-skips")


def test_a_change_of_nothing_is_refused_and_leaves_no_backup(folder: Path, capsys: Any) -> None:
    names = sorted(folder.iterdir())
    assert "nothing to change" in said(capsys, "edit", folder, code=1)
    assert "position is -3" in said(capsys, "edit", folder, "--position", "-3", code=1)
    assert f"position is {10**20}" in said(capsys, "edit", folder, "--position", 10**20, code=1)
    for first, last in ((9, 8), (-1, 8), (9, 10**20)):
        assert f"steps {first} to {last} cannot be" in said(capsys, "edit", folder, "--skip", first, last, code=1)
    assert sorted(folder.iterdir()) == names


@pytest.mark.parametrize("step", [-1, 10**20])
def test_a_step_that_no_training_has_is_refused(step: int, folder: Path, capsys: Any) -> None:
    assert f"step is {step}; it must be an int, 0 to" in said(capsys, "samples", folder, "--step", step, code=1)


def test_a_step_and_a_sample_lead_to_each_other(folder: Path, capsys: Any) -> None:
    shown = said(capsys, "samples", folder, "--step", "4")
    assert "Step 4 was made of 8 samples, positions 32 to 39" in shown
    found = [int(index) for index in re.findall(r"index (\d+)  source TinyDataset  \1\b", shown)]
    assert found == indices_of_step(4)
    assert "Step 9 will be made" in said(capsys, "samples", folder, "--step", "9")
    uses = said(capsys, "samples", folder, "--sample", found[3])
    assert f"Sample {found[3]} (TinyDataset, {found[3]}) was used 1 time(s) in the 6 steps done" in uses
    assert "step 4  row 3  epoch 0" in uses
    assert "was used 0 time(s)" in said(capsys, "samples", folder, "--sample", indices_of_step(7)[0])
    assert "is outside a dataset of 160" in said(capsys, "samples", folder, "--sample", "160", code=1)


def test_a_config_names_the_sources_that_a_checkpoint_has_no_room_for(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    config = tmp_path / "config_of_many_sources.py"
    config.write_text(
        CONFIG
        + "from libai_data.config import LazyCall\n"
        + "from tests.engine.tiny import TinyDataset\n"
        + "dataloader.train.dataset = [LazyCall(TinyDataset)(length=8, seed=seed) for seed in range(20)]\n"
    )
    shown = said(capsys, "samples", folder, "--step", "4", "--config-file", config)
    for index in indices_of_step(4):
        assert f"index {index}  source {index // 8}:TinyDataset  {index % 8}\n" in shown
    config.write_text(CONFIG.replace("length=160", "length=80"))
    message = said(capsys, "samples", folder, "--step", "4", "--config-file", config, code=1)
    assert "has 80 samples, but the dataset of the checkpoint has 160" in message


def test_samples_of_several_sources_are_named_by_source_and_own_index(folder: Path, capsys: Any) -> None:
    path = folder / CHECKPOINT
    state = json.loads((path / "state.json").read_text())
    parts = [{"name": "Web", "samples": 100}, {"name": "Books", "samples": 60}]
    state["stateful"]["train_loader"]["dataset"] = {"name": "ConcatDataset", "content": parts}
    text = json.dumps(state, indent=1).encode()
    (path / "state.json").write_bytes(text)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(text), "crc32": zlib.crc32(text)}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "Dataset: ConcatDataset of Web (100), Books (60)" in said(capsys, "show", path)
    shown = said(capsys, "samples", path, "--step", "4")
    for index in indices_of_step(4):
        source, own = ("0:Web", index) if index < 100 else ("1:Books", index - 100)
        assert f"index {index}  source {source}  {own}\n" in shown


def test_a_config_lists_samples_in_lanes_as_the_steps_took_them(tmp_path: Path, capsys: Any) -> None:
    def in_lanes(folder: Path) -> Any:
        cfg = config_of(folder, length=160, num_accumulation_steps=2, train_micro_batch_size=4)
        cfg.dataloader.train.sampler = LazyCall(CyclicSampler)(shuffle=True, lanes=4, block=2)
        return cfg

    steps = train(in_lanes(tmp_path / "run"), stop_after=5).steps
    config = tmp_path / "config.yaml"
    LazyConfig.save(in_lanes(tmp_path / "unused"), str(config))
    assert "--config-file" in said(capsys, "samples", tmp_path / "run", "--step", "4", code=1)
    assert "in 4 lanes, blocks of 2 shards, shuffled in each epoch" in said(capsys, "show", tmp_path / "run")
    shown = said(capsys, "samples", tmp_path / "run", "--step", "4", "--config-file", config)
    assert [int(index) for index in re.findall(r"index (\d+)  source", shown)] == steps[4]
    uses = said(capsys, "samples", tmp_path / "run", "--sample", steps[4][3], "--config-file", config)
    assert "step 4  row 3  epoch 0" in uses
