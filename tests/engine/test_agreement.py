"""Ranks that run other packages, other code or another config are named before anything is built."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from libai_data.config import LazyCall, LazyConfig
from libai_data.delivery.same_values import differences
from libai_data.engine import agreement
from libai_data.engine.agreement import config_values, hash_of_values, mesh_warnings, needed_versions, own_version
from libai_data.errors import ConfigError
from libai_data.launch.launcher import free_port
from libai_data.mesh.parallel_mesh import ParallelMesh
from tests.deadline import run_to_end
from tests.distributed.jobs import Job
from tests.distributed.processes import ranks_environment
from tests.engine.tiny import TinyDataset


def test_a_rank_with_another_version_or_one_more_key_is_named() -> None:
    told = agreement._problem(
        [{"version": {"numpy": "1"}, "config": {}}, {"version": {"numpy": "2"}, "config": {"depth": "3"}}]
    )
    differences = "the version of numpy is 1 on rank 0, but 2 on rank 1; the config of depth is absent on rank 0, but 3"
    assert told.startswith(f"the ranks do not run the same: {differences} on rank 1. Start all of them with the same")


@pytest.mark.slow
def test_what_is_compared_is_the_same_in_another_process(repository: Path) -> None:
    code = (
        "from libai_data.config import LazyConfig; from libai_data.engine.agreement import *; "
        "print(hash_of_values(config_values(LazyConfig.load('configs/vit_digits.py'))), own_version())"
    )
    ended = run_to_end([sys.executable, "-c", code], cwd=repository, check=True)
    cfg = LazyConfig.load(repository / "configs" / "vit_digits.py")
    assert ended.stdout.split(maxsplit=1) == [hash_of_values(config_values(cfg)), f"{own_version()}\n"]


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2) | st.lists(st.text("a b.{}é", max_size=3), max_size=2))
)
def test_configs_have_equal_values_where_they_are_equal(values: dict[str, Any]) -> None:
    first, second = OmegaConf.create(values), OmegaConf.create(dict(reversed(list(values.items()))))
    assert hash_of_values(config_values(first)) == hash_of_values(config_values(second))
    second["a"] = {"changed": 1}
    assert hash_of_values(config_values(first)) != hash_of_values(config_values(second))


def test_what_may_differ_is_not_compared_and_must_exist() -> None:
    def values(**changed: Any) -> dict[str, str]:
        train = {"may_differ": ["data.root", "data.pace"], "output": "a"}
        data = {"root": {"path": 1}, "rooted": 2, "pace": 3, **changed}
        return config_values(OmegaConf.create({"train": train, "data": data}))

    assert values(root="/other") == values()
    assert values(rooted=3) != values()
    assert values(pace=4) == values()
    assert values(seed=3) != values()
    cfg = OmegaConf.create({"train": {"may_differ": ["data.rot"]}, "data": {"root": 1}})
    with pytest.raises(ConfigError, match=r"names 'data\.rot', which the config lacks\. Did you mean 'data\.root'"):
        config_values(cfg)


def test_targets_and_objects_have_their_names_and_no_addresses() -> None:
    cfg = OmegaConf.create({"dataset": LazyCall(TinyDataset)(length=3), "x": [1.5]}, flags={"allow_objects": True})
    cfg.transform = TinyDataset(2)
    values = config_values(cfg)
    assert values["dataset.length"] == "3" and values["x.0"] == "1.5"
    assert any("TinyDataset" in value for key, value in values.items() if key.startswith("dataset."))
    assert values["transform"] == "a TinyDataset"


def test_versions_are_those_that_are_installed() -> None:
    versions = needed_versions()
    assert versions["numpy"] == importlib.metadata.version("numpy")
    assert versions["oneflow"] == importlib.metadata.version("oneflow")
    assert "pytest" not in versions


@given(st.dictionaries(st.integers(0, 9), st.dictionaries(st.sampled_from("ab"), st.sampled_from("xyz")), min_size=1))
def test_nothing_differs_exactly_where_all_are_equal(values: dict[int, dict[str, str]]) -> None:
    first = next(iter(values.values()))
    assert (differences(values) == []) == all(each == first for each in values.values())


def test_of_many_differences_the_first_are_named() -> None:
    found = differences({0: {}, 1: {f"k{number}": "1" for number in range(9)}})
    assert found[0] == "k0 is absent on rank 0, but 1 on rank 1" and found[-1] == "and 4 more"


def test_a_tensor_parallel_group_on_two_nodes_is_warned_of() -> None:
    (warning,) = mesh_warnings(ParallelMesh(2, 4, 1, num_nodes=4))
    assert "2 tensor-parallel group(s) span nodes, such as ranks 0 to 3 on nodes 0 to 1" in warning
    assert "tensor_parallel_size (4) divide the 2 ranks of a node" in warning
    (warning,) = mesh_warnings(ParallelMesh(4, 3, 1, num_nodes=3))
    assert "2 tensor-parallel group(s) span nodes, such as ranks 3 to 5 on nodes 0 to 1" in warning


@pytest.mark.parametrize("mesh", [(4, 3, 1, 0, 2), (2, 4, 1, 0, 1), (8, 1, 2, 0, 8), (2, 4, 2, 0, 4)])
def test_a_mesh_whose_tensor_groups_stay_on_their_nodes_is_not(mesh: Any) -> None:
    assert mesh_warnings(ParallelMesh(*mesh)) == []


def test_a_training_whose_ranks_have_other_configs_ends_before_it_builds_anything(
    repository: Path, tmp_path: Path
) -> None:
    port, config = str(free_port()), str(repository / "tests" / "engine" / "tiny_config.py")
    with Job() as job:
        for rank in range(2):
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
            own = [f"train.seed={7 + rank}", f"train.output_dir={tmp_path}"]
            command = [sys.executable, str(repository / "tools" / "train_net.py"), "--config-file", config, *own]
            job.start(command, ranks_environment({**env, "LOCAL_RANK": str(rank)}))
        ended = job.wait(60)
    assert ended.codes == [1, 1], ended.output
    assert "the config of train.seed is 7 on rank 0, but 8 on rank 1" in ended.outputs[0]
    assert "Traceback" not in ended.output
    assert not (tmp_path / "config.yaml").exists()
