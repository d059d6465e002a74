"""What a loader does inside of LiBai's trainer; on ranks and with LiBai it is tested in tests/distributed/."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from omegaconf import OmegaConf

from libai_data import DataLoader, from_iterable
from libai_data.engine.data_state import DataState
from libai_data.errors import CheckpointError, SchemaError
from libai_data.integrations.libai import DataPipeline, LiBaiLoader, build_nlp_train_loader, loader
from tests.iterables.rows import numbers


@pytest.fixture(autouse=True)
def _without_libai(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "take_part", lambda: None)


NUMBERS = [{"x": np.array(index)} for index in range(40)]


def made(batch: int, seed: int = 1) -> Any:
    return build_nlp_train_loader(dataset=NUMBERS, train_batch_size=batch, seed=seed, num_workers=0)[0]


def rows(batches: Any, count: int) -> list[int]:
    return [row for _, batch in zip(range(count), batches) for row in batch.x.tensor.numpy().tolist()]


def test_a_checkpoint_of_another_batch_size_continues_at_the_same_sample() -> None:
    stopped, other = made(4), made(8)
    whole = rows(made(4), 10)
    rows(stopped, 3)
    other.load_state_dict(stopped.state_dict())
    assert rows(other, 3) == whole[12:36]


def test_a_checkpoint_without_data_continues_after_what_libai_counted_or_is_refused() -> None:
    counted = made(4)
    counted.go_to(8)
    assert rows(counted, 2) == rows(made(4), 4)[8:]
    for uncounted in (from_iterable(numbers, 4, ends="cycle"), from_iterable(NUMBERS, 4, ends="drop")):
        with pytest.raises(CheckpointError, match=r"cannot continue after 8 samples.*resume_override=\[restart_data\]"):
            LiBaiLoader(uncounted).go_to(8)


class Named:
    """In place of LiBai's trainer: tells which builder its config names."""

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        return cfg.dataloader.train._target_


class Pipeline(DataPipeline, Named):
    """What a user writes."""


def test_builders_of_other_packages_and_arguments_without_effect_are_told(caplog: pytest.LogCaptureFixture) -> None:
    for target, called in (
        ("libai.data.build.build_nlp_train_loader", "libai_data.integrations.libai.build_nlp_train_loader"),
        ("mine.build", "mine.build"),
    ):
        assert Pipeline.build_train_loader(OmegaConf.create({"dataloader": {"train": {"_target_": target}}})) == called
    with caplog.at_level("INFO"):
        build_nlp_train_loader(dataset=NUMBERS, train_batch_size=4, num_workers=0, pin_memory=True)[0].close()
    assert "mine.build is not a builder of LiBai. It is called unchanged, and its data do not resume" in caplog.text
    assert "pin_memory=True is ignored" in caplog.text


def of_a_trainer(train_loader: LiBaiLoader) -> LiBaiLoader:
    """The train loader of a trainer, after the trainer's `resume_or_load`."""
    trainer = SimpleNamespace(train_loader=train_loader, checkpointer=SimpleNamespace(checkpointables={}), start_iter=0)
    trainer.cfg = OmegaConf.create({"train": {}})
    loader._with_data(lambda trainer, resume: None)(trainer, False)
    return train_loader


def test_a_train_loader_that_ends_is_repeated_and_resumed() -> None:
    whole, stopped, resumed = (LiBaiLoader(DataLoader(NUMBERS, batch_size=16, shuffle=True)) for _ in range(3))
    batches = iter(whole)  # LiBai takes the pass before `resume_or_load`.
    of_a_trainer(whole)
    expected = rows(batches, 9)
    assert [sorted(expected[first : first + 40]) for first in (0, 40, 80)] == [list(range(40))] * 3
    assert rows(iter(of_a_trainer(stopped)), 4) == expected[:56]
    resumed.load_state_dict(stopped.state_dict())
    assert rows(iter(of_a_trainer(resumed)), 5) == expected[56:]
    assert len(rows(iter(LiBaiLoader(DataLoader(NUMBERS, batch_size=16))), 9)) == 40  # of an evaluation


def test_data_begin_anew_where_that_is_asked_for() -> None:
    stopped, anew = made(4), made(4, seed=2)
    rows(stopped, 3)
    with pytest.raises(CheckpointError, match="seed was 1 and is now 2"):
        DataState(anew, ()).load_state_dict(stopped.state_dict())
    place = DataState(anew, ["restart_data"])
    place.load_state_dict(stopped.state_dict())
    assert place.may_be_absent
    assert rows(anew, 2) == rows(made(4, seed=2), 2)


def test_a_trainer_of_libai_before_the_data_pipeline_is_refused() -> None:
    libais = type("DefaultTrainer", (Named,), {"__module__": "libai.engine.default"})
    with pytest.raises(TypeError, match=r"write class Mine\(DataPipeline, DefaultTrainer\)"):
        type("Mine", (libais, DataPipeline), {})
    mixin = type("Mixin", (), {})
    mine = type("Mine", (mixin, DataPipeline, libais), {})
    assert issubclass(type("Derived", (mine,), {}), DataPipeline)


def test_a_loader_without_a_length_is_true() -> None:
    assert LiBaiLoader(from_iterable(numbers, 4))


class AsLiBais(flow.nn.Graph):
    """A graph as LiBai's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = flow.nn.Identity()

    def build(self, **inputs: Any) -> Any:
        return self.model(inputs["a"] - 2 * inputs["b"])


def test_a_graph_of_libai_gets_its_inputs_by_their_names() -> None:
    AsLiBais.__call__ = loader._by_names(AsLiBais.__call__)
    graph, a, b = AsLiBais(), flow.rand(512, 512), flow.rand(512, 512)
    expected = (a - 2 * b).numpy()
    for inputs in ({"a": a, "b": b}, {"b": b, "a": a}):
        np.testing.assert_array_equal(graph(**inputs).numpy(), expected)
    with pytest.raises(SchemaError, match=r"the inputs are \['a', 'c'\], but the graph is compiled for \['a', 'b'\]"):
        graph(a=a, c=b)
