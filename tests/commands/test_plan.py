"""`libai-data plan`: a job of any size on paper."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.commands.index import main as index
from libai_data.commands.plan import JobPlan, main
from libai_data.errors import bytes_in_words
from libai_data.loader.schema import FieldSpec, Layout
from libai_data.mesh.parallel_mesh import ParallelMesh
from tools.prepare_digits import write_digits

CONFIG = str(Path(__file__).resolve().parents[2] / "configs" / "vit_digits.py")
ON_128_NODES = "train.dist.tensor_parallel_size=4 train.global_batch_size=512 --nodes 128 --ranks-per-node 8"
TOKENS = FieldSpec("tokens", np.dtype(np.int64), (8,), Layout(("split_0", "split_1")))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("plan")
    write_digits(folder / "data" / "digits")
    return folder


def test_a_job_of_1024_ranks_is_planned_without_starting_one(
    digits: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(digits)
    assert main([CONFIG, *ON_128_NODES.split()]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1,024 ranks on 128 node(s): data 256 x tensor 4 x pipeline 1; 512 samples per step" in shown
    assert (
        "images float32 [1, 8, 8] [512, 1, 8, 8] split_0, broadcast [0:2] [510:512] 256 part(s), each on 4 rank(s)"
        in shown
    )
    # 2 samples for each of 8 ranks; 2 for each of the 2 parts; all, with an image of 256 bytes and a label of 8.
    assert re.search(r"every_rank \(config\) 0-127 16 4 times 4\.22 KB - - 4\.22 KB", shown)
    assert re.search(r"node 0-127 4 1 times 1\.06 KB - - 1\.06 KB", shown)
    assert re.search(r"rank0 0 512 1 times 135 KB - 134 KB 135 KB", shown)
    assert re.search(r"rank0 1-127 0 1 times - 1\.06 KB - 1\.06 KB", shown)
    assert "node 1 (ranks 8-15): rank 8 part 2" in shown
    assert "Recommended: dataloader.train.readers=node" in shown


def test_who_reads_parts_of_samples_is_told_to_go_on_reading_them_itself() -> None:
    mesh = ParallelMesh(2, 4, 1, num_nodes=2)
    assert JobPlan(mesh, 2, (TOKENS,), reads_parts=True).recommended()[0] == "every_rank"
    assert JobPlan(mesh, 2, (TOKENS,), reads_parts=False).recommended()[0] == "node"
    assert JobPlan(ParallelMesh(8, 1, 1, num_nodes=2), 2, (TOKENS,)).recommended()[0] == "every_rank"


STREAMED = """
import numpy as np
from omegaconf import DictConfig

from libai_data import build_image_train_loader
from libai_data.config import LazyCall, get_config
from libai_data.data.samplers import CyclicSampler
from libai_data.data.sources import open_source


class Numbers:
    def __init__(self, address):
        self.source = open_source(address, streaming=True)
        self.shard_lengths = self.source.shard_lengths

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return {"x": np.array(self.source[index]["data"])}


sampler = LazyCall(CyclicSampler)(shuffle=True, lanes=8, block=1)
dataset = LazyCall(Numbers)(address="file://FOLDER")
dataloader = DictConfig(
    {"train": LazyCall(build_image_train_loader)(dataset=[dataset], sampler=sampler), "test": []},
    flags={"allow_objects": True},
)
train = get_config("common/train.py").train
train.global_batch_size, train.train_micro_batch_size, train.train_iter = 16, None, 9
model = LazyCall(dict)()
"""


def test_the_cache_of_the_machine_that_plans_need_not_be_enough_for_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(32):
        np.save(folder / f"{number:02}.npy", np.full((10, 100), number))
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LIBAI_DATA_CACHE_SIZE", "20KB")  # two shards
    assert index([f"file://{folder}"]) == 0
    (tmp_path / "config.py").write_text(STREAMED.replace("FOLDER", str(folder)))
    assert main([str(tmp_path / "config.py"), "--nodes", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    # Each node has 4 lanes; the batches that are read at once may need three blocks of each, in half of the cache.
    cost = rf"0-1 16 130 KB 130 KB {2 * 12 * 8128 + 1:,} bytes \d[\d.]* KB If a node fetches the bytes"
    assert f"32 shard files, {bytes_in_words(32 * 8128)}" in shown and re.search(cost, shown)
    assert len(list((tmp_path / "cache").glob("files/*.npy"))) <= 2
