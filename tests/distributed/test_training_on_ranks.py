"""A training on 4 ranks is that of 1 rank, and stops and resumes on any mesh."""

from __future__ import annotations

import re
import shutil
from ast import literal_eval
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import oneflow as flow
import pytest
from safetensors.numpy import load_file

from libai_data.engine import DefaultTrainer, default_setup
from libai_data.mesh.current import set_mesh
from tests.distributed.examples import values
from tests.distributed.launcher import found_by_ranks, launch_ranks
from tests.distributed.processes import LaunchResult
from tests.engine.data_runs import Stop, Stopped
from tests.engine.tiny_images import image_config
from tests.properties import slowly

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 9


def train_on_one_rank(folder: Path, depth: int, stop: bool = False, resume: bool = False) -> None:
    set_mesh(None)
    cfg = image_config(str(folder), depth)
    cfg.train.resume = resume
    default_setup(cfg)
    trainer = DefaultTrainer(cfg)
    if stop:
        trainer.register_hooks([Stop(7)])
        with pytest.raises(Stopped):
            trainer.train()
    else:
        trainer.train()
    set_mesh(None)


class Launched(NamedTuple):
    """What a launch left."""

    folder: Path
    one_rank: Path
    depth: int
    result: LaunchResult


@pytest.fixture(scope="module", params=["2 x 2 tensor", slowly("2 x 2 tensor, all"), slowly("2 x 2 pipeline, all")])
def launched(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder, one_rank = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("one_rank")
    flow.manual_seed(0)
    tensor, depth = (2, 1) if "tensor" in request.param else (1, 2)
    train_on_one_rank(one_rank, depth)
    train_on_one_rank(folder / "from_one_rank", depth, stop=True)
    how_many = "all" if "all" in request.param else "some"
    arguments = str(folder), str(tensor), str(depth), how_many
    # All means graphs, too.
    result = launch_ranks(SCRIPTS / "train_and_resume.py", 4, *arguments, timeout=240, alone=how_many == "all")
    assert result.returncode == 0, result.output
    return Launched(folder, one_rank, depth, result)


def test_losses_and_accuracies_are_those_of_one_rank(launched: Launched) -> None:
    for name in ("whole", *(["accumulated"] if (launched.folder / "accumulated").exists() else [])):
        np.testing.assert_allclose(values(launched.folder / name), values(launched.one_rank), rtol=1e-4)
        assert values(launched.folder / name, "Acc@1") == values(launched.one_rank, "Acc@1")
    assert len(values(launched.one_rank)) == STEPS
    logs = sorted(path.name for path in (launched.folder / "whole").glob("log*"))
    assert logs == ["log.txt", *(f"log.txt.rank{rank}" for rank in range(1, 4))]


def test_a_stopped_training_resumes_bit_for_bit(launched: Launched) -> None:
    assert launched.result.output.count("RESUMED AT 5") == 4
    assert values(launched.folder / "cut") == values(launched.folder / "whole")
    assert values(launched.folder / "cut", "lr") == values(launched.folder / "whole", "lr")
    cut, whole = (load_file(launched.folder / name / "model_final" / "model.safetensors") for name in ("cut", "whole"))
    assert_weights(cut, whole, rtol=0)


@pytest.mark.parametrize("launched", [slowly("2 x 2 tensor, all")], indirect=True)
def test_a_stopped_graph_resumes_bit_for_bit(launched: Launched) -> None:
    assert values(launched.folder / "graph_cut") == values(launched.folder / "graph_whole")


def test_four_ranks_continue_the_training_of_one(launched: Launched) -> None:
    np.testing.assert_allclose(values(launched.folder / "from_one_rank"), values(launched.one_rank), rtol=1e-4)


def test_one_rank_continues_the_training_of_four(launched: Launched, tmp_path: Path) -> None:
    shutil.copytree(launched.folder / "whole" / "model_0000004", tmp_path / "model_0000004")
    (tmp_path / "last_checkpoint").write_text("model_0000004")
    train_on_one_rank(tmp_path, launched.depth, resume=True)
    np.testing.assert_allclose(values(tmp_path), values(launched.one_rank)[5:], rtol=1e-4)


def test_a_checkpoint_holds_whole_tensors_whatever_the_mesh(launched: Launched) -> None:
    for name in ("model", "optimizer"):
        file = f"model_0000004/{name}.safetensors"
        ours, theirs = load_file(launched.folder / "whole" / file), load_file(launched.one_rank / file)
        assert ours.keys() == theirs.keys()
        # Attention does not depend on its key's bias: that is rounding noise, which AdamW makes large.
        for each in (ours, theirs):
            for key in [key for key in each if key.endswith("query_key_value.bias")]:
                each[key] = np.zeros_like(each[key])
        assert_weights(ours, theirs, rtol=1e-3)


def assert_weights(left: dict[str, np.ndarray], right: dict[str, np.ndarray], rtol: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=rtol, atol=rtol * 1e-2, err_msg=name)


def test_every_rank_hears_of_rank_0s_full_disk(launched: Launched) -> None:
    assert launched.result.output.count("could not be written: [Errno 28] No space left on device") == 4
    assert list((launched.folder / "full_disk").iterdir()) == []


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_training_with_its_traceback(tmp_path: Path) -> None:
    result = launch_ranks(SCRIPTS / "fail_in_training.py", 2, str(tmp_path), "raise", timeout=60, end_on_error=False)
    assert result.returncode != 0
    lines = result.output.splitlines()
    assert lines.count("RuntimeError: rank 1 fails in step 3") == 1
    # What other ranks write after it does not hide it: the launcher quotes it at the end.
    assert lines.count("  | RuntimeError: rank 1 fails in step 3") <= 1
    assert "Traceback" in result.output


@pytest.mark.slow
def test_a_rank_that_exits_with_code_0_in_the_middle_ends_the_training_and_is_named(tmp_path: Path) -> None:
    result = launch_ranks(SCRIPTS / "fail_in_training.py", 2, str(tmp_path), "exit", timeout=60, end_on_error=False)
    assert result.returncode != 0
    # Either rank may say it first.
    assert re.search(r"^rank [01] ends: rank 1 has left the job after \d+ collectives", result.output, re.MULTILINE), (
        result.output
    )


@pytest.mark.slow
def test_a_rank_that_alone_changes_the_end_of_the_training_ends_it_and_is_named(tmp_path: Path) -> None:
    result = launch_ranks(SCRIPTS / "fail_in_training.py", 2, str(tmp_path), "prolong", timeout=60, end_on_error=False)
    assert result.returncode != 0
    assert re.search(
        r"ranks have begun different collectives: the end of the training \(trainer.max_iter = 12\).* on rank 0, but",
        result.output,
    ), result.output


def test_ranks_of_a_tensor_parallel_group_draw_the_same_dropout_masks(tmp_path: Path) -> None:
    result = launch_ranks(SCRIPTS / "dropout_on_ranks.py", 2, str(tmp_path), timeout=120)
    assert result.returncode == 0, result.output
    for run in ("False-2", "True-2"):
        assert (tmp_path / f"{run}-0").read_text() == (tmp_path / f"{run}-1").read_text()


def test_evaluations_and_checkpoints_use_the_average_of_running_statistics(tmp_path: Path) -> None:
    found = found_by_ranks(SCRIPTS / "running_statistics.py", 2, tmp_path, timeout=120)
    assert found == [{"evaluate": [[0.5], [0.5]], "save": [[0.5], [0.5]]}] * 2


@pytest.mark.slow
def test_running_statistics_of_a_later_pipeline_stage_are_averaged(tmp_path: Path) -> None:
    found = found_by_ranks(SCRIPTS / "running_statistics.py", 4, tmp_path, timeout=120)
    assert found == [{"save": [[], []]}] * 2 + [{"save": [[0.5], [0.5]]}] * 2


def test_the_log_has_the_mean_over_all_ranks_of_local_losses(tmp_path: Path) -> None:
    result = launch_ranks(SCRIPTS / "local_losses.py", 2, str(tmp_path / "logged.txt"), timeout=120)
    assert result.returncode == 0, result.output
    logged = literal_eval((tmp_path / "logged.txt").read_text())
    assert logged["a_loss"] == [(1.0, 0), (2.0, 1)]
    assert logged["total_loss"] == [(2.0, 0), (3.0, 1)]


def test_lamb_is_refused_for_weights_that_ranks_split(tmp_path: Path) -> None:
    for split, whole, other in found_by_ranks(SCRIPTS / "split_weights.py", 2, tmp_path, timeout=120):
        assert "the optimizer is LAMB, and several ranks split 'weight'" in split
        assert "train.dist.tensor_parallel_size=1" in split
        assert whole == other == ""
