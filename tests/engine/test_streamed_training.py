"""A training, its commands and LiBai's loader give with streamed shards what they give with the same files opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.commands.index import main as index
from libai_data.commands.inspection import inspect_config
from libai_data.config import LazyCall
from libai_data.data.samplers import CyclicSampler, Ledger
from libai_data.data.sources import open_source
from libai_data.integrations.libai import build_nlp_train_loader, loader
from libai_data.structures import Instance
from tests.engine.data_runs import config_of, metric, train
from tests.engine.tiny import CLASSES, TinyDataset

SAMPLES, SHARD = 40, 5
LANES = {"shuffle": True, "lanes": 2, "block": 2}


class Points:
    """The points of `TinyDataset`, from files."""

    def __init__(self, paths: str, streaming: bool) -> None:
        self.source = open_source(paths, streaming=streaming)
        self.shard_lengths = self.source.shard_lengths

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> Instance:
        points = np.array(self.source[number]["data"])
        return Instance(points=points, labels=np.int64(points[:CLASSES].argmax()))

    def fingerprint(self) -> str:
        return "points"


@pytest.mark.slow
def test_a_streamed_training_is_that_of_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(SAMPLES // SHARD):
        np.save(folder / f"{number}.npy", TinyDataset(SAMPLES).points[number * SHARD : (number + 1) * SHARD])
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "take_part", lambda: None)
    assert index([f"file://{folder}"]) == 0

    def run(name: str, paths: str, streaming: bool) -> Any:
        def cfg() -> Any:
            made = config_of(tmp_path / name)
            dataset = LazyCall(Points)(paths=paths, streaming=streaming)
            made.dataloader.train.dataset = dataset
            made.dataloader.train.sampler = LazyCall(CyclicSampler)(**LANES)
            made.dataloader.test[0].dataset = dataset
            made.train.skip_steps = [[2, 3]]
            made.train.evaluation.enabled = True
            return made

        steps = train(cfg(), stop_after=5).steps
        trainer = train(cfg(), resume=True)
        steps.update(trainer.steps)
        order = trainer.train_loader.stream.state
        assert Ledger(order).samples_of(4)[1].tolist() == steps[4]
        assert [card.origin.index for card in inspect_config(cfg(), step=4).cards] == steps[4]
        libai = build_nlp_train_loader(Points(paths, streaming), 8, sampler=LazyCall(CyclicSampler)(**LANES))[0]
        points = [batch.points.tensor.numpy().tobytes() for _, batch in zip(range(4), libai)]
        losses, accuracy = (metric(tmp_path / name, what) for what in ("total_loss", "Acc@1"))
        assert len(losses) == 12 and accuracy
        return steps, losses, accuracy, order.to_json(), points

    streamed, local = run("streamed", f"file://{folder}", True), run("local", str(folder), False)
    assert streamed == local
    assert list((tmp_path / "cache").rglob("*.npy"))
