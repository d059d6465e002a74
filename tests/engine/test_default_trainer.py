from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np
import oneflow as flow
import pytest
from tqdm import tqdm

from libai_data.commands.train import main
from libai_data.config import LazyCall, LazyConfig, default_argument_parser
from libai_data.delivery import to_global
from libai_data.engine import DefaultTrainer, HookBase, default_setup
from libai_data.engine.checkpoint import Checkpointer
from libai_data.errors import CheckpointError, ConfigError, SchemaError
from libai_data.iterables import DataLoader, from_iterable
from libai_data.iterables.combined import CombinedLoader
from libai_data.mesh import say_farewell, set_mesh
from libai_data.structures import DistTensorData, Instance
from tests.deadline import run_to_end
from tests.engine.data_runs import Stop, Stopped, metric
from tests.engine.tiny import GRAPH_BALLAST, TinyDataset, TinyModel, assert_equal_weights, tiny_config, weights
from tests.properties import slowly


class SignalAfter3(HookBase):
    """Sends this process a signal in the middle of a training."""

    def after_step(self) -> None:
        if self.trainer.iter == 3:
            os.kill(os.getpid(), signal.SIGUSR1)


def stop_by_a_signal(cfg: Any) -> None:
    """Train until a signal after the step 3 ends it."""
    trainer = built(cfg, SignalAfter3())
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGUSR1, signal.SIGTERM)}
    with pytest.raises(SystemExit) as stopped:
        trainer.train()
    assert stopped.value.code == 85
    for signum, handler in before.items():
        signal.signal(signum, handler)
    say_farewell()


def trained(cfg: Any, kind: Any = DefaultTrainer, resume: bool = False, stop_after: int | None = None) -> Any:
    """Set up and train; `stop_after` ends it rudely after that step."""
    args = default_argument_parser().parse_args(["--resume"] if resume else [])
    default_setup(cfg, args)
    flow.manual_seed(cfg.train.seed)
    trainer = kind(cfg)
    trainer.register_hooks([Stop(stop_after)])
    if stop_after is None:
        trainer.train()
    else:
        with pytest.raises(Stopped):
            trainer.train()
    return trainer


class TwoDropouts(TinyModel):
    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.other, self.own = flow.nn.Dropout(0.5), flow.nn.Dropout(0.5)
        self.own.generator.manual_seed(7)


def test_dropout_masks_depend_on_the_seed_and_differ_between_modules(tmp_path: Path) -> None:
    drawn = []
    for seed in (1, 1, 2):
        cfg = tiny_config(str(tmp_path), seed=seed)
        cfg.model = LazyCall(TwoDropouts)()
        model = built(cfg).model
        drawn.append([part(flow.ones(64)).numpy().tolist() for part in (model.dropout, model.other, model.own)])
        set_mesh(None)
    first, again, other = drawn
    assert first == again
    assert first[0] != first[1]
    assert first[2] == other[2]
    assert all(mask not in first for mask in other[:2])


def built(cfg: Any, *hooks: HookBase, kind: Any = DefaultTrainer) -> Any:
    """A trainer that has not begun."""
    default_setup(cfg)
    trainer = kind(cfg)
    trainer.register_hooks(hooks)
    return trainer


class Whole(NamedTuple):
    """A training of 12 steps that nothing has interrupted."""

    folder: Path
    weights: dict[str, np.ndarray]
    results: Any


MakeWhole = Callable[[bool], Whole]


@pytest.fixture(scope="module")
def whole_training(tmp_path_factory: pytest.TempPathFactory) -> MakeWhole:
    @cache
    def made(graph: bool) -> Whole:
        folder = tmp_path_factory.mktemp("whole")
        trainer = trained(tiny_config(str(folder), graph=graph))
        set_mesh(None)
        return Whole(folder, weights(trainer.model), trainer._last_eval_results)

    return made


MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def test_a_training_leaves_checkpoints_config_metrics_and_events(whole_training: MakeWhole) -> None:
    folder, _, results = whole_training(False)
    names = {path.name for path in folder.iterdir()}
    expected = {"model_0000004", "model_0000009", "model_final", "model_best", "last_checkpoint"}
    assert expected | {"config.yaml", "metrics.json", "log.txt"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert sorted(metric(folder)) == list(range(12))
    assert sorted(metric(folder, "Acc@1")) == [4, 9, 11]
    assert results["Acc@1"] == metric(folder, "Acc@1")[11]
    saved = LazyConfig.load(folder / "config.yaml")
    assert saved.train.train_micro_batch_size == 8
    assert saved.train.dist.data_parallel_size == 1


@MODES
def test_a_trainer_is_gone_when_it_is_let_go(tmp_path: Path, graph: bool) -> None:
    # Else the garbage collector ends its graphs, at another moment on each rank, and the ranks wait for each other.
    trainer = trained(tiny_config(str(tmp_path), graph=graph, train_iter=2))
    references = [weakref.ref(trainer), weakref.ref(trainer.graph_train if graph else trainer.model)]
    gc.disable()
    try:
        del trainer
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("graph", [False, slowly(True)], ids=["eager", "graph"])
def test_a_stopped_training_resumes_bit_for_bit(tmp_path: Path, graph: bool, whole_training: MakeWhole) -> None:
    whole = whole_training(graph)
    trained(tiny_config(str(tmp_path), graph=graph), stop_after=7)
    set_mesh(None)
    resumed = trained(tiny_config(str(tmp_path), graph=graph), resume=True)
    assert resumed.start_iter == 5
    for name in ("total_loss", "lr", "Acc@1"):
        assert metric(tmp_path, name) == metric(whole.folder, name)
    assert_equal_weights(resumed.model, whole.weights)


@MODES
def test_a_checkpoint_of_one_mode_continues_in_the_other(
    tmp_path: Path, graph: bool, whole_training: MakeWhole
) -> None:
    trained(tiny_config(str(tmp_path), graph=graph), stop_after=7)
    trained(tiny_config(str(tmp_path), graph=not graph), resume=True)
    whole, cut = metric(whole_training(False).folder), metric(tmp_path)
    np.testing.assert_allclose([cut[step] for step in range(12)], [whole[step] for step in range(12)], rtol=1e-4)


@pytest.mark.parametrize("graph", [False, slowly(True)], ids=["eager", "graph"])
def test_a_signal_ends_the_training_with_a_checkpoint_of_the_last_step_and_its_losses(
    tmp_path: Path, graph: bool
) -> None:
    def config(name: str) -> Any:
        return tiny_config(str(tmp_path / name), graph=graph, log_period=20)

    trained(config("whole"))
    stop_by_a_signal(config("cut"))
    assert sorted(path.name for path in (tmp_path / "cut").glob("model*")) == ["model_0000003"]
    resumed = trained(config("cut"), resume=True)
    assert resumed.start_iter == 4
    # A line is the mean since the line before.
    cut, whole = metric(tmp_path / "cut"), metric(tmp_path / "whole")
    assert (sorted(cut), sorted(whole)) == ([3, 4, 9, 11], [4, 9, 11])  # evaluations write lines, too
    assert 4 * cut[3] + cut[4] == pytest.approx(5 * whole[4], rel=1e-6)
    assert [cut[9], cut[11]] == pytest.approx([whole[9], whole[11]], rel=1e-6)


def test_a_signal_where_a_checkpoint_was_just_written_writes_no_second_one(tmp_path: Path, monkeypatch: Any) -> None:
    saved: list[str] = []
    save = Checkpointer.save

    def noting(self: Checkpointer, name: str, **options: Any) -> None:
        saved.append(name)
        save(self, name, **options)

    monkeypatch.setattr(Checkpointer, "save", noting)
    cfg = tiny_config(str(tmp_path))
    cfg.train.checkpointer.period = 4
    stop_by_a_signal(cfg)
    assert saved == ["model_0000003"]


def test_a_signal_in_the_last_step_lets_the_training_end_as_usual(tmp_path: Path) -> None:
    assert "Acc@1" in built(tiny_config(str(tmp_path), train_iter=4), SignalAfter3()).train()
    assert (tmp_path / "last_checkpoint").read_text() == "model_final"
    say_farewell()


def test_the_signals_that_stop_a_training_are_those_of_the_config(tmp_path: Path) -> None:
    class Handlers(HookBase):
        def after_step(self) -> None:
            found.append([callable(signal.getsignal(signum)) for signum in (signal.SIGTERM, signal.SIGUSR2)])

    found: list[list[bool]] = []
    cfg = tiny_config(str(tmp_path), train_iter=1)
    cfg.train.checkpointer.stop_signals = ["SIGUSR2"]
    built(cfg, Handlers()).train()
    assert found == [[False, True]]
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    cfg.train.checkpointer.stop_signals = ["SIGTREM"]
    with pytest.raises(ConfigError, match=r"'SIGTREM'.*SIGTERM"):
        DefaultTrainer(cfg)


def test_a_training_below_the_working_directory_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained(tiny_config("output/tiny"), stop_after=7)
    assert trained(tiny_config("output/tiny"), resume=True).start_iter == 5


def test_a_finished_training_has_nothing_to_resume_and_can_be_prolonged(
    tmp_path: Path, whole_training: MakeWhole
) -> None:
    folder = shutil.copytree(whole_training(False).folder, tmp_path / "run")
    again = trained(tiny_config(str(folder)), resume=True)
    assert again.start_iter == 12
    longer = trained(tiny_config(str(folder), train_iter=14), resume=True)
    assert (longer.start_iter, longer.iter) == (12, 14)
    assert sorted(metric(folder)) == list(range(14))


def test_a_resume_without_a_checkpoint_is_refused_in_training_and_evaluation(
    tmp_path: Path, whole_training: MakeWhole
) -> None:
    with pytest.raises(CheckpointError, match="--resume found no intact checkpoint"):
        trained(tiny_config(str(tmp_path), train_iter=2), resume=True)
    for more in ((), ("--eval-only", f"train.load_weight={whole_training(False).folder}/model_final")):
        with pytest.raises(CheckpointError, match="--resume found no intact checkpoint"):
            command(tmp_path / "empty", "--resume", *more)


def test_the_best_checkpoint_survives_a_resume_with_worse_results(tmp_path: Path) -> None:
    class Scripted(DefaultTrainer):
        scores = iter([50.0, 70.0])

        def _evaluate(self) -> dict[str, Any]:
            return {"Acc@1": next(self.scores)}

    class Worse(Scripted):
        scores = iter([60.0, 65.0, 66.0])

    trained(tiny_config(str(tmp_path)), Scripted, stop_after=10)
    best = json.loads((tmp_path / "model_best" / "state.json").read_text())["extra"]["best"]
    assert best == {"metric": "Acc@1", "value": 70.0, "iteration": 9}
    trained(tiny_config(str(tmp_path)), Worse, resume=True)
    assert json.loads((tmp_path / "model_best" / "state.json").read_text())["extra"]["best"] == best


def test_the_best_checkpoint_of_steps_that_are_repeated_is_replaced(tmp_path: Path) -> None:
    class Scripted(DefaultTrainer):
        scores = iter([50.0, 70.0, 60.0, 55.0])

        def _evaluate(self) -> dict[str, Any]:
            return {"Acc@1": next(self.scores)}

    trainer = built(tiny_config(str(tmp_path), train_iter=10, checkpointer={"period": 4}), kind=Scripted)
    trainer.train()
    trainer.checkpointer.load(str(tmp_path / "model_0000003"))
    trainer.train()
    best = json.loads((tmp_path / "model_best" / "state.json").read_text())["extra"]["best"]
    assert best == {"metric": "Acc@1", "value": 60.0, "iteration": 4}


def test_loaded_weights_start_a_training_of_their_own(tmp_path: Path, whole_training: MakeWhole) -> None:
    trainer = built(tiny_config(str(tmp_path), load_weight=str(whole_training(False).folder / "model_final")))
    assert trainer.start_iter == 0
    assert_equal_weights(trainer.model, whole_training(False).weights)


def test_epochs_become_steps_over_the_whole_dataset(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path), train_iter=0, train_epoch=3, global_batch_size=16, train_micro_batch_size=4)
    cfg.train.evaluation.eval_after_n_epoch = 1
    cfg.train.checkpointer.save_model_after_n_epoch = 2
    trainer = built(cfg)
    # 40 samples: an epoch is 2.5 steps.
    assert trainer.max_iter == 8
    assert (cfg.train.evaluation.eval_period, cfg.train.checkpointer.period) == (2, 5)
    assert cfg.train.warmup_iter == 2
    assert cfg.train.samples == 8 * 16
    assert cfg.train.num_accumulation_steps == 4


def test_a_period_of_whole_steps_is_not_a_step_short_by_rounding(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path), train_iter=1, global_batch_size=10)
    cfg.dataloader.train.dataset.length = 23
    cfg.train.evaluation.eval_after_n_epoch = 50
    built(cfg)
    assert cfg.train.evaluation.eval_period == 115  # 2.3 * 50 is 114.99999999999999 for floats


@pytest.mark.parametrize(("drop_last", "batches"), [(False, 3), (True, 2)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_epochs_of_a_loader_that_ends_are_whole(tmp_path: Path, drop_last: bool, batches: int, accumulate: int) -> None:
    class Reads(DefaultTrainer):
        @classmethod
        def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
            return DataLoader(TinyDataset(40), batch_size=16, drop_last=drop_last)

    keys = {"train_iter": 0, "train_epoch": 2, "global_batch_size": 16 * accumulate, "train_micro_batch_size": 16}
    assert built(tiny_config(str(tmp_path), **keys), kind=Reads).max_iter * accumulate == 2 * batches


def test_a_graph_refuses_a_smaller_last_batch_at_the_start_if_the_training_comes_to_it(tmp_path: Path) -> None:
    class Reads(DefaultTrainer):
        rows = 8

        @classmethod
        def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
            return DataLoader(TinyDataset(20), batch_size=cls.rows)

    cfg = tiny_config(str(tmp_path), graph=True, train_iter=3)
    with pytest.raises(ConfigError, match=r"last batch of an epoch has 4 of 8 rows, .* Set drop_last=True, ends='pad'"):
        built(cfg, kind=Reads)
    set_mesh(None)
    built(tiny_config(str(tmp_path), graph=True, train_iter=2), kind=Reads)
    set_mesh(None)
    Reads.rows = 24  # Each epoch is one batch of 20 rows.
    built(tiny_config(str(tmp_path), graph=True, train_iter=3, global_batch_size=24), kind=Reads)


LISTS = [[*range(8)], [*range(8, 12)], [*range(12, 20)]]


@pytest.mark.parametrize(
    ("make", "which"),
    [
        (lambda dataset: DataLoader(dataset, batch_sampler=LISTS), "batch 1"),
        (lambda dataset: DataLoader(dataset, 8, sampler=range(12)), "the last batch"),
        (lambda dataset: from_iterable(Measured(dataset), 8), "the last batch"),
        (lambda dataset: from_iterable(torch_loader(dataset)), "the last batch"),
        (lambda dataset: torch_loader(dataset), "the last batch"),
        (lambda dataset: tqdm(DataLoader(dataset, 8)), "the last batch"),
        (lambda dataset: CombinedLoader({"a": DataLoader(dataset, 4), "b": DataLoader(dataset, 16)}), "the last batch"),
    ],
    ids=["lists", "sampler", "stream", "batches", "torch", "bar", "combined"],
)
def test_a_graph_refuses_a_batch_of_another_size_at_the_start_if_its_size_is_known(
    make: Callable[[Any], Any], which: str, tmp_path: Path
) -> None:
    class Reads(DefaultTrainer):
        @classmethod
        def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
            return make(TinyDataset(20))

    with pytest.raises(ConfigError, match=rf"{which} of an epoch has 4 of (8|16) rows( of loader 'b')?, but a graph"):
        built(tiny_config(str(tmp_path), graph=True, train_iter=3), kind=Reads)


class Measured:
    """A stream with a length."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Any:
        return (self._dataset[index] for index in range(len(self)))


def torch_loader(dataset: Any) -> Any:
    return pytest.importorskip("torch.utils.data").DataLoader(dataset, 8)


class GuidesTrainer(DefaultTrainer):
    """As LiBai's guide shows: a loader of one's own, and `get_batch` with the documented signature."""

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        dataset = TinyDataset(40)
        return (
            [(dataset.points[first : first + 8], dataset.labels[first : first + 8]) for first in range(0, 40, 8)],
            None,
            None,
        )

    @classmethod
    def get_batch(cls, data: Any, mixup_func: Callable | None = None) -> dict[str, Any]:  # type: ignore[override]
        if isinstance(data, Instance):
            return to_global(data)
        return to_global({"points": data[0], "labels": DistTensorData(data[1], placement_idx=-1)})


class LoaderAlone(GuidesTrainer):
    """`build_train_loader` returns a loader that is no list, has no length, and cannot be saved."""

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        class Loader:
            def __iter__(self) -> Iterator[Any]:
                return iter(GuidesTrainer.build_train_loader(cfg)[0])

        return Loader()

    @classmethod
    def get_batch(cls, batch: Any) -> dict[str, Any]:  # type: ignore[override]
        return GuidesTrainer.get_batch(batch)


class NotOnTheClass(GuidesTrainer):
    """`build_train_loader` is a method of the trainer instead of the class."""

    def build_train_loader(self, cfg: Any, tokenizer: Any = None) -> Any:  # type: ignore[override]
        return GuidesTrainer.build_train_loader(self.cfg)


@pytest.mark.parametrize(
    ("kind", "graph"),
    [(GuidesTrainer, False), (LoaderAlone, True), (NotOnTheClass, False)]
    + [slowly(GuidesTrainer, True), slowly(LoaderAlone, False), slowly(NotOnTheClass, True)],
)
@pytest.mark.parametrize("micro", [slowly(8), 4])
def test_any_iterable_and_any_signature_of_get_batch_train(tmp_path: Path, kind: Any, graph: bool, micro: int) -> None:
    cfg = tiny_config(str(tmp_path), graph=graph, global_batch_size=8 * (8 // micro), train_micro_batch_size=8)
    trainer = trained(cfg, kind)
    losses = metric(tmp_path)
    assert len(losses) == 12
    assert losses[11] < losses[0]
    assert trainer._last_eval_results["Acc@2"] > 50


@pytest.mark.parametrize("kind", [slowly(GuidesTrainer), LoaderAlone])
def test_a_loader_that_cannot_be_saved_resumes_with_the_next_batch(tmp_path: Path, kind: Any) -> None:
    def config(name: str) -> Any:
        return tiny_config(str(tmp_path / name), global_batch_size=8, train_micro_batch_size=8)

    whole = trained(config("whole"), kind)
    trained(config("cut"), kind, stop_after=7)
    resumed = trained(config("cut"), kind, resume=True)
    assert resumed.start_iter == 5
    assert_equal_weights(resumed.model, weights(whole.model))


class TwoLoaders(GuidesTrainer):
    """`build_train_loader` returns a train and a validation loader, without a test loader."""

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        return GuidesTrainer.build_train_loader(cfg)[:2]


def test_a_tuple_of_two_loaders_is_no_train_loader(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="build_train_loader returned a tuple of 2; return a train loader, or"):
        built(tiny_config(str(tmp_path)), kind=TwoLoaders)


def test_data_restart_where_the_config_asks_for_it_unless_they_follow_the_steps(tmp_path: Path) -> None:
    seen: list[float] = []

    class Noting(LoaderAlone):
        @classmethod
        def get_batch(cls, batch: Any) -> dict[str, Any]:  # type: ignore[override]
            seen.append(float(batch[0][0, 0]))
            return super().get_batch(batch)

    def config(name: str, **train: Any) -> Any:
        cfg = tiny_config(str(tmp_path / name), **train)
        cfg.train.checkpointer.period = 3
        cfg.train.evaluation.enabled = False
        return cfg

    trained(config("restarted", train_micro_batch_size=8), Noting, stop_after=7)
    before, restart = seen[:], {"resume_override": ["restart_data"]}
    seen.clear()
    assert trained(config("restarted", train_micro_batch_size=8, **restart), Noting, resume=True).start_iter == 6
    assert seen == before[:6] != before[1:7]
    trained(config("following"), stop_after=7)
    with pytest.raises(ConfigError, match=r"'restart_data', but the train loader \(BatchLoader\) follows the steps"):
        trained(config("following", **restart), resume=True)


def test_epochs_of_a_loader_without_a_dataset_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.train_epoch is set.*set train.train_iter instead"):
        built(tiny_config(str(tmp_path), train_epoch=2), kind=LoaderAlone)


def test_mixup_is_applied_to_the_local_tensors(tmp_path: Path) -> None:
    batch = Instance(images=DistTensorData(flow.ones(2, 3)), labels=DistTensorData(flow.tensor([1, 2])))
    inputs = DefaultTrainer.get_batch(batch, "cpu", lambda images, labels: (images * 2, labels + 1))
    assert inputs["images"].numpy().tolist() == [[2] * 3] * 2
    assert inputs["labels"].numpy().tolist() == [2, 3]


class MisnamedDataset(TinyDataset):
    """Calls its points "point"."""

    def __getitem__(self, index: int) -> Instance:
        sample = super().__getitem__(index)
        return Instance(point=sample.points, labels=sample.labels)


@MODES
def test_a_field_that_forward_does_not_take_is_named_before_the_first_step(tmp_path: Path, graph: bool) -> None:
    cfg = tiny_config(str(tmp_path), graph=graph)
    cfg.dataloader.train.dataset._target_ = MisnamedDataset
    with pytest.raises(SchemaError, match=r"'point'.*Did you mean 'points'"):
        built(cfg).train()


@pytest.mark.parametrize("missing", ["model", "optim", "dataloader", "train.scheduler"])
def test_a_missing_section_is_named(tmp_path: Path, missing: str) -> None:
    cfg = tiny_config(str(tmp_path))
    if missing == "train.scheduler":
        cfg.train.scheduler = None
    else:
        del cfg[missing]
    with pytest.raises(ConfigError, match=missing):
        built(cfg)


CONFIG = str(Path(__file__).with_name("tiny_config.py"))


def command(tmp_path: Path, *arguments: str, kind: Any = DefaultTrainer) -> Any:
    set_mesh(None)
    return main(["--config-file", CONFIG, *arguments, f"train.output_dir={tmp_path}"], kind)


@pytest.fixture(scope="module")
def run_of_7(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder and the results of a run of 7 steps."""
    folder = tmp_path_factory.mktemp("run_of_7")
    results = command(folder, "train.train_iter=7")
    return folder, results


@pytest.fixture()
def run_folder(run_of_7: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of its folder."""
    return Path(shutil.copytree(run_of_7[0], tmp_path / "run"))


def test_the_command_trains_evaluates_and_resumes(run_of_7: tuple[Path, Any], run_folder: Path) -> None:
    assert command(run_folder, "--eval-only", "--resume") == run_of_7[1]
    at_5 = ["--eval-only", f"train.load_weight={run_folder}/model_0000004"]
    results = command(run_folder, *at_5)
    assert results["Acc@1"] == metric(run_folder, "Acc@1")[4]
    assert command(run_folder, *at_5, "graph.enabled=true", f"model.ballast={GRAPH_BALLAST}") == pytest.approx(results)
    command(run_folder, "--resume", "train.train_iter=9")
    assert sorted(metric(run_folder)) == list(range(9))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_training_needs_no_standard_streams(tmp_path: Path) -> None:
    """Its shell command closes them, as some daemons do; the descriptors must not become those of other files."""
    code = (
        f"import os; from libai_data.commands.train import main; main([{CONFIG!r}, 'train.train_iter=2']); "
        "open('found', 'w').write(' '.join(os.readlink(f'/proc/self/fd/{number}') for number in range(3)))"
    )
    command = [sys.executable, "-c", code]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run_to_end(closed, 120, check=True, cwd=tmp_path, env=environment)
    assert (tmp_path / "found").read_text() == "/dev/null /dev/null /dev/null"
    assert "Training took" in (tmp_path / "output/tiny/log.txt").read_text()


def test_a_fast_dev_run_takes_20_steps_evaluates_every_10_and_leaves_its_log_alone(run_folder: Path) -> None:
    before = contents(run_folder)
    kept: dict[str, list[int]] = {}

    class Kept(DefaultTrainer):
        def train(self, start_iter: int | None = None, max_iter: int | None = None) -> Any:
            results = super().train(start_iter, max_iter)
            folder = Path(self.cfg.train.output_dir)
            kept["steps"], kept["evaluated"] = sorted(metric(folder)), sorted(metric(folder, "Acc@1"))
            return results

    for _ in range(2):
        command(run_folder, "--fast-dev-run", "train.train_epoch=7", "train.log_period=100", kind=Kept)
        assert kept == {"steps": list(range(20)), "evaluated": [9, 19]}
        after = contents(run_folder)
        log = after.pop("fast_dev_run/log.txt").decode()
        assert after == before
    assert log.count("iteration 19/19") == 2
    with pytest.raises(RuntimeError, match="a bug"):
        command(run_folder, "--fast-dev-run", kind=Failing)
    assert set(contents(run_folder)) == {*before, "fast_dev_run/log.txt"}
    with pytest.raises(ConfigError, match="give it without --resume"):
        command(run_folder, "--fast-dev-run", "--resume")


@pytest.mark.parametrize("override", ["train.train_iter=-1", "train.log_period=0", "train.evaluation.eval_period=-2"])
def test_a_fast_dev_run_refuses_what_the_training_would(run_folder: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=override.replace("=", " is ")):
        command(run_folder, "--fast-dev-run", override)


def test_the_resume_that_a_restart_adds_changes_neither_an_evaluation_nor_a_fast_dev_run(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBAI_DATA_RESTARTED", "1")
    command(run_folder, "--resume", "--eval-only", f"train.load_weight={run_folder}/model_0000004")
    assert f"Loaded the weights of checkpoint {run_folder}/model_0000004." in (run_folder / "log_eval.txt").read_text()
    command(run_folder, "--resume", "--fast-dev-run")


class Failing(DefaultTrainer):
    def run_step(self) -> None:
        super().run_step()
        if self.iter == 15:
            raise RuntimeError("a bug")


def test_an_evaluation_changes_nothing_in_a_runs_folder_but_a_log_of_its_own(run_folder: Path) -> None:
    before = contents(run_folder)
    command(run_folder, "--eval-only", "--resume", "train.seed=7")
    after = contents(run_folder)
    assert b"Command line" in after.pop("log_eval.txt")
    assert after == before


def test_an_evaluation_needs_no_folder_to_write_to(
    run_of_7: tuple[Path, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    weights = f"train.load_weight={run_of_7[0]}/model_final"
    assert "Acc@1" in command(tmp_path / "file" / "run", "--eval-only", weights)
    assert f"log lines cannot be written to {tmp_path}/file/run/log_eval.txt" in capfd.readouterr().err


def test_an_evaluation_without_weights_says_how_to_give_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.load_weight"):
        command(tmp_path, "--eval-only")


def test_an_evaluation_refuses_weights_that_do_not_fit_unless_they_are_named(run_folder: Path) -> None:
    evaluation = ["--eval-only", f"train.load_weight={run_folder}/model_final", "model.hidden=5"]
    with pytest.raises(CheckpointError, match=r"'first.weight' is \(8, 6\) instead of \(5, 6\)"):
        command(run_folder, *evaluation)
    with pytest.raises(CheckpointError, match=r"model: 'second.weight' is \(3, 8\) instead of \(3, 5\)\."):
        command(run_folder, *evaluation, "train.load_weight_may_differ=['first.*']")
    command(run_folder, *evaluation, "train.load_weight_may_differ=['first.*','second.weight']")


def test_checkpoints_keep_the_state_of_hooks_that_have_one(tmp_path: Path) -> None:
    class Counts(HookBase):
        steps = 0

        def after_step(self) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.steps = state["steps"]

    first, second = Counts(), Counts()
    for hooks in ([first], [second, Counts()]):
        cfg = tiny_config(str(tmp_path), train_iter=3 if hooks == [first] else 5, resume=hooks != [first])
        trainer = built(cfg, *hooks)
        trainer.train()
    assert (first.steps, second.steps, hooks[1].steps) == (3, 5, 2)

    class Holds(Counts):
        def state_dict(self) -> dict[str, Any]:
            return {"steps": object()}

    with pytest.raises(TypeError, match="checkpoints cannot store the state_dict of the hook Holds"):
        trainer.register_hooks([Holds()])


def test_overrides_of_the_command_line_are_applied_once(tmp_path: Path) -> None:
    args = default_argument_parser().parse_args(["train.seed=7", "train.log_period=3"])
    cfg = tiny_config(str(tmp_path / "one"))
    default_setup(cfg, args)
    assert (cfg.train.seed, cfg.train.log_period) == (7, 3)
    changed = LazyConfig.apply_overrides(tiny_config(str(tmp_path / "other")), args.opts)
    changed.train.seed = 9
    default_setup(changed, args)
    assert (changed.train.seed, changed.train.log_period) == (9, 3)
